"""The flags of `pagecast generate`, and its line of JSON."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from pagecast.v1 import generation_pb2, session_pb2
from service.cli import main
from tests.client.fake_server import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def run(*arguments: str, stdin: str | bytes | None = None, **env: str) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin, env=env)


def test_generate_json_is_one_line(fake: FakeServer) -> None:
    result = run("generate", "hé", "--target", fake.target, "--json", "--plan", "replan")
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    record = json.loads(line)
    assert 0 < record.pop("ttft_ms") < 5000
    assert 0 <= record.pop("itl_ms") < 5000
    assert record == {
        "session_id": "ses_0",
        "prompt_token_ids": [ord("h"), ord("é")],
        "token_ids": [ord("h"), ord("é")],
        "text": "hé",
        "finish_reason": "EOS",
        "plan_stats": {
            "builds": 0,
            "reuses": 0,
            "replans": 2,
            "launches_per_step": 9,
            "host_bytes_per_step": 100,
            "plan_ns": 7,
            "step_ns": 8,
            "arena_bytes": 4096,
        },
        "stopped_by": None,
        "logprobs": None,
        "top_logprobs": None,
        "sampling": dict.fromkeys(session_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
        | {"temperature": 0.0, "seed": 7},
        "usage": {"input_tokens": 2, "cached_tokens": 0, "reprefilled_tokens": 0, "output_tokens": 2},
        "revision": 1,
    }


def test_json_shows_the_temperature_as_it_was_given(fake: FakeServer) -> None:
    fake.sampling = session_pb2.SamplingParams(temperature=0.7, seed=2**64 - 1)
    result = run("generate", "hey", "--target", fake.target, "--json", "--temperature", "0.7")
    sampling = json.loads(result.stdout)["sampling"]
    assert (sampling["temperature"], sampling["seed"], sampling["top_k"]) == (0.7, 2**64 - 1, None)


def test_generate_json_without_a_second_token_has_no_itl(fake: FakeServer) -> None:
    result = run("generate", "hey", "--target", fake.target, "--json", "--max-tokens", "1")
    assert json.loads(result.stdout)["itl_ms"] is None


def test_generate_sends_what_flags_say(fake: FakeServer) -> None:
    flags = ["--model", "tiny", "--temperature", "0.5", "--seed", "9", "--raw", "--plan", "once"]
    assert run("generate", "-", "--target", fake.target, *flags, stdin="from stdin").exit_code == 0
    opened = fake.last(session_pb2.OpenSessionRequest)
    assert opened.decode_plan == session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE
    request = fake.last(generation_pb2.GenerateRequest)
    assert request.input == session_pb2.Input(text="from stdin")
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 9)
    assert not request.HasField("stopping")


def test_generate_sends_every_sampling_and_stopping_flag(fake: FakeServer) -> None:
    flags = {
        "--top-k": "5", "--top-p": "0.5", "--min-p": "0.25", "--repetition-penalty": "1.5",
        "--presence-penalty": "-2", "--frequency-penalty": "0.5", "--min-tokens": "2",
        "--time-limit": "1.5", "--queue-timeout": "2", "--priority": "-3", "--max-tokens": "4",
        "--temperature": "0",
    }  # fmt: skip
    pairs = [word for pair in flags.items() for word in pair]
    repeated = ["--logit-bias", "5=-1.5", "--logit-bias", "6=2", "--stop", "x y", "--stop", "\n"]
    repeated += ["--stop-token-id", "7", "--stop-token-id", "8", "--ignore-eos"]
    assert run("generate", "a", "--target", fake.target, *pairs, *repeated).exit_code == 0
    request = fake.last(generation_pb2.GenerateRequest)
    assert request.sampling == session_pb2.SamplingParams(
        temperature=0, top_k=5, top_p=0.5, min_p=0.25, repetition_penalty=1.5, presence_penalty=-2,
        frequency_penalty=0.5, logit_bias={5: -1.5, 6: 2},
    )  # fmt: skip
    assert request.stopping == generation_pb2.StoppingCriteria(
        max_tokens=4, min_tokens=2, stop_sequences=["x y", "\n"], stop_token_ids=[7, 8], ignore_eos=True
    )
    assert (request.time_limit.ToMilliseconds(), request.queue_timeout.seconds) == (1500, 2)
    assert request.priority == -3


def test_json_tells_logprobs_and_what_stopped_it(fake: FakeServer) -> None:
    flags = ["--json", "--logprobs", "2", "--stop", "l"]
    record = json.loads(run("generate", "hello", "--target", fake.target, *flags).stdout)
    assert (record["text"], record["finish_reason"], record["stopped_by"]) == ("he", "STOP_SEQUENCE", "l")
    assert record["logprobs"] == [0.0, -1.0]
    assert record["top_logprobs"] == [[[0, 0.0], [1, -1.0]]] * 2


def test_logprobs_without_json_are_refused(fake: FakeServer) -> None:
    result = run("generate", "hello", "--target", fake.target, "--logprobs", "2")
    assert (result.exit_code, fake.requests) == (2, [])
    assert "--logprobs shows with --json only" in result.stderr


def test_generate_takes_every_option_from_the_environment(fake: FakeServer) -> None:
    env = {
        "PAGECAST_TARGET": fake.target,
        "PAGECAST_MODEL": "tiny",
        "PAGECAST_PLAN": "replan",
        "PAGECAST_MAX_TOKENS": "2",
        "PAGECAST_TEMPERATURE": "0.25",
        "PAGECAST_SEED": "5",
        "PAGECAST_RAW": "1",
        "PAGECAST_JSON": "1",
        "PAGECAST_TIMEOUT": "20",
    }
    result = run("generate", "hello", **env)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["text"] == "he"
    request = fake.last(generation_pb2.GenerateRequest)
    assert (request.sampling.temperature, request.sampling.seed, request.input.text) == (0.25, 5, "hello")
    assert fake.last(session_pb2.OpenSessionRequest).decode_plan == session_pb2.PAGED_DECODE_PLAN_REPLAN


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--target", "nowhere"), ("--target", "a\udcff:1"), ("--model", "\udcff"), ("--plan", "twice"),
        ("--max-tokens", "0"), ("--max-tokens", "4294967296"), ("--max-tokens", "2.5"),
        ("--temperature", "-1"), ("--temperature", "100.1"), ("--temperature", "nan"), ("--temperature", "x"),
        ("--seed", "-1"), ("--seed", str(2**64)),
        ("--top-k", "0"), ("--top-p", "0"), ("--top-p", "1.1"), ("--top-p", "nan"), ("--min-p", "1.5"),
        ("--repetition-penalty", "0"), ("--presence-penalty", "2.1"), ("--frequency-penalty", "nan"),
        ("--time-limit", "0"), ("--queue-timeout", "nan"), ("--priority", "2147483648"),
        ("--min-tokens", "-1"),
        ("--timeout", "0"), ("--timeout", "86401"), ("--timeout", "nan"), ("--timeout", "inf"),
    ],
)  # fmt: skip
def test_wrong_flags_are_named(fake: FakeServer, flag: str, value: str) -> None:
    for given, env in (([flag, value], {}), ([], {"PAGECAST_" + flag[2:].replace("-", "_").upper(): value})):
        result = run("generate", "hello", *given, **({"PAGECAST_TARGET": fake.target} | env))
        assert (result.exit_code, result.stdout) == (2, "")
        assert flag in result.stderr
        assert fake.requests == []


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--logit-bias", "5"), ("--logit-bias", "x=1"), ("--logit-bias", "5=nan"), ("--logit-bias", "-1=2"),
        ("--logit-bias", "4294967296=1"), ("--stop", "\udcff"), ("--stop-token-id", "-1"),
        ("--logprobs", "21"), ("--stop", ""), ("--stop", "\u00e9" * 129), ("--logit-bias", "5=100.5"),
        ("--logit-bias", "5=-101"), ("--model", ""),
    ],
)  # fmt: skip
def test_wrong_flags_that_have_no_variable_are_named(fake: FakeServer, flag: str, value: str) -> None:
    result = run("generate", "hello", "--target", fake.target, flag, value)
    assert (result.exit_code, result.stdout, fake.requests) == (2, "", [])
    assert flag in result.stderr


@pytest.mark.parametrize("plan", ["once", "ONCE", "plan_once", "PLAN_ONCE"])
def test_plans_in_any_case_and_by_their_proto_name(fake: FakeServer, plan: str) -> None:
    assert run("generate", "a", "--target", fake.target, "--plan", plan).exit_code == 0
    opened = fake.last(session_pb2.OpenSessionRequest)
    assert opened.decode_plan == session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"]])
def test_values_that_need_no_server_are_refused_on_this_side(fake: FakeServer, command: list[str]) -> None:
    for flags, told in [
        (["--min-tokens", "5", "--max-tokens", "4"], "'--min-tokens': 5 is over --max-tokens, 4."),
        (["--stop", "x"] * 17, "'--stop': is given 17 times; at most 16."),
        (["--stop-token-id", "1"] * 65, "'--stop-token-id': is given 65 times; at most 64."),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "'--logit-bias': token 5 is given twice."),
        (
            [f"--logit-bias={at}=1" for at in range(1025)],
            "'--logit-bias': is given 1025 times; at most 1024.",
        ),
        (["--logit-bias", "5=101"], "'--logit-bias': 101 is not at least -100 and at most 100."),
        (["--stop", ""], "'--stop': is empty."),
        (["--plan", "twice"], "'--plan' (env var: 'PAGECAST_PLAN'): 'twice' is not one of 'once', 'replan'."),
    ]:
        result = run(*command, "--target", fake.target, *flags, stdin="")
        assert (result.exit_code, result.stdout, fake.requests) == (2, "", [])
        assert result.stderr.splitlines()[-1] == f"Error: Invalid value for {told}"
    flags = ["--min-tokens", "4", "--max-tokens", "4", "--logit-bias", "5=-100"]
    assert run(*command, "--target", fake.target, *flags, stdin="").exit_code == 0


@pytest.mark.parametrize("command", ["generate", "tokenize"])
def test_an_empty_text_is_refused_on_this_side(fake: FakeServer, command: str) -> None:
    result = run(command, "", "--target", fake.target)
    assert (result.exit_code, result.stderr, fake.requests) == (2, "error: TEXT: it is empty\n", [])
    result = run(command, "-", "--target", fake.target, stdin="")
    assert (result.exit_code, result.stderr, fake.requests) == (
        2,
        "error: TEXT: standard input is empty\n",
        [],
    )
