"""The client commands against a small real server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version

import grpc
import pytest
from click.testing import CliRunner, Result

from pagecast.v1 import generation_pb2, session_pb2
from service.cli import main
from tests.client.fake_server import FakeServer, Refusal


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def run(*arguments: str, stdin: str | bytes | None = None, **env: str) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin, env=env)


def test_generate_streams_the_text_and_closes_the_session(fake: FakeServer) -> None:
    result = run("generate", "hello", "--target", fake.target, "--max-tokens", "3")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "hel\n", "")
    assert fake.state["ses_0"].state == session_pb2.SESSION_STATE_CLOSED


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
        },
        "sampling": {"temperature": 0.0, "seed": 7},
        "usage": {"input_tokens": 2, "cached_tokens": 0, "reprefilled_tokens": 0, "output_tokens": 2},
        "revision": 1,
    }


def test_json_shows_the_temperature_as_it_was_given(fake: FakeServer) -> None:
    fake.sampling = session_pb2.SamplingParams(temperature=0.7, seed=2**64 - 1)
    result = run("generate", "hey", "--target", fake.target, "--json", "--temperature", "0.7")
    assert json.loads(result.stdout)["sampling"] == {"temperature": 0.7, "seed": 2**64 - 1}


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
    ("served", "line"),
    [
        ([], "error: NO_WORKER: no worker is there\n"),
        (["a", "b"], "error: FIELD_REQUIRED: name one of the served models with --model: a, b\n"),
    ],
)
def test_generate_without_model_needs_exactly_one(fake: FakeServer, served: list[str], line: str) -> None:
    fake.models = served
    result = run("generate", "hello", "--target", fake.target)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", line)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_models_of_an_empty_server_fails(fake: FakeServer, flags: list[str]) -> None:
    fake.models = []
    result = run("models", "--target", fake.target, *flags)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: NO_WORKER: no worker is there\n"


def test_a_model_that_is_not_served_is_told_with_those_that_are(fake: FakeServer) -> None:
    fake.models = ["tiny", "other"]
    result = run("generate", "hello", "--target", fake.target, "--model", "huge")
    line = "error: MODEL_NOT_FOUND: 'huge' is not served; served: tiny, other\n"
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", line)
    fake.models = []
    result = run("generate", "hello", "--target", fake.target, "--model", "huge")
    assert (result.exit_code, result.stderr) == (1, "error: NO_WORKER: no worker is there\n")


def test_the_path_of_a_model_file_is_its_served_name(fake: FakeServer) -> None:
    assert run("generate", "a", "--target", fake.target, "--model", "models/tiny.gguf").exit_code == 0
    assert run("generate", "a", PAGECAST_TARGET=fake.target, PAGECAST_MODEL="/x/tiny.gguf").exit_code == 0
    assert fake.last(session_pb2.OpenSessionRequest).model == "tiny"


def test_a_refusal_is_one_line_and_closes_the_session(fake: FakeServer) -> None:
    fake.refusals["Generate"] = Refusal(
        grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "9 tokens\nare over 8", "input"
    )
    result = run("generate", "hello", "--target", fake.target, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: PROMPT_TOO_LONG: 9 tokens are over 8 (field input)\n"
    assert fake.state["ses_0"].state == session_pb2.SESSION_STATE_CLOSED


def test_timeout_is_the_deadline(fake: FakeServer) -> None:
    fake.hold_after = 1
    result = run("generate", "hello", "--target", fake.target, "--timeout", "0.3")
    assert result.exit_code == 1
    assert result.stdout == "h\n"
    assert result.stderr == "error: DEADLINE_EXCEEDED: the deadline of 0.3 s passed\n"
    assert fake.state["ses_0"].state == session_pb2.SESSION_STATE_CLOSED


@pytest.mark.parametrize("command", [["generate", "hello"], ["models"]])
def test_no_server_says_how_to_start_one(command: list[str]) -> None:
    result = run(*command, "--target", "127.0.0.1:1")
    line = "error: UNAVAILABLE: no server answers at 127.0.0.1:1; start one with: pagecast serve\n"
    assert (result.exit_code, result.stderr) == (1, line)


def test_a_server_without_worker_keeps_its_own_words(fake: FakeServer) -> None:
    fake.refusals["OpenSession"] = Refusal(grpc.StatusCode.UNAVAILABLE, "NO_WORKER", "no worker is live")
    result = run("generate", "hello", "--target", fake.target)
    assert (result.exit_code, result.stderr) == (1, "error: NO_WORKER: no worker is live\n")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--target", "nowhere"), ("--target", "a\udcff:1"), ("--model", "\udcff"), ("--plan", "twice"),
        ("--max-tokens", "0"), ("--max-tokens", "4294967296"), ("--max-tokens", "2.5"),
        ("--temperature", "-1"), ("--temperature", "100.1"), ("--temperature", "nan"), ("--temperature", "x"),
        ("--seed", "-1"), ("--seed", str(2**64)),
        ("--timeout", "0"), ("--timeout", "86401"), ("--timeout", "nan"), ("--timeout", "inf"),
    ],
)  # fmt: skip
def test_wrong_flags_are_named(fake: FakeServer, flag: str, value: str) -> None:
    for given, env in (([flag, value], {}), ([], {"PAGECAST_" + flag[2:].replace("-", "_").upper(): value})):
        result = run("generate", "hello", *given, **({"PAGECAST_TARGET": fake.target} | env))
        assert (result.exit_code, result.stdout) == (2, "")
        assert flag in result.stderr
        assert fake.requests == []


def test_an_address_of_the_wrong_form_is_told_in_our_words() -> None:
    line = "error: --target (PAGECAST_TARGET): expected HOST:PORT, got 'nowhere'\n"
    assert run("models", "--target", "nowhere").stderr == line


@pytest.mark.parametrize("plan", ["once", "ONCE", "plan_once", "PLAN_ONCE"])
def test_plans_in_any_case_and_by_their_proto_name(fake: FakeServer, plan: str) -> None:
    assert run("generate", "a", "--target", fake.target, "--plan", plan).exit_code == 0
    opened = fake.last(session_pb2.OpenSessionRequest)
    assert opened.decode_plan == session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE


def test_text_that_is_no_text_is_refused(fake: FakeServer) -> None:
    result = run("generate", "ab\udcff", "--target", fake.target)
    assert (result.exit_code, result.stderr) == (2, "error: TEXT: not UTF-8 at character 2\n")
    result = run("generate", "-", "--target", fake.target, stdin=b"abc\xff")
    assert (result.exit_code, result.stderr) == (2, "error: TEXT: standard input is not UTF-8 at byte 3\n")
    assert fake.requests == []


def test_tokens_come_one_by_one_and_ctrl_c_cancels(fake: FakeServer) -> None:
    fake.hold_after = 2
    command = [sys.executable, "-m", "service.cli", "generate", "hello", "--target", fake.target]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(2) == b"he"  # while the server holds the third back
            assert not fake.ended.is_set()
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
            assert process.stderr.read() == b""
        finally:
            process.kill()  # does nothing to one that has ended; a hung one would hang the test
    assert fake.ended.wait(5)
    assert fake.state["ses_0"].state == session_pb2.SESSION_STATE_CLOSED


def test_models_as_table_and_as_lines(fake: FakeServer) -> None:
    fake.models = ["tiny", "other"]
    table = run("models", "--target", fake.target)
    assert table.exit_code == 0
    assert all(word in table.stdout for word in ("tiny", "other", "llama", "134,515,008"))
    lines = run("models", "--target", fake.target, "--json")
    records = [json.loads(line) for line in lines.stdout.splitlines()]
    assert [record["name"] for record in records] == ["tiny", "other"]
    assert records[0]["max_context_tokens"] == 8192


def test_version() -> None:
    assert run("--version").stdout == f"pagecast {version('pagecast')}\n"


@pytest.mark.parametrize("command", [[], ["serve"], ["generate"], ["models"]])
def test_short_help_works_everywhere(command: list[str]) -> None:
    result = run(*command, "-h")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")
