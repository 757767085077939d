"""The commands against a small real server; `serve` up to the call that runs the gateway."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import service.server
from pagecast.v1 import generation_pb2, session_pb2
from service.cli import main
from service.config import ServeSettings
from service.terminal import Waiting
from tests.client.fake_server import FakeServer, Refusal


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def run(*arguments: str, stdin: str | None = None, **env: str) -> Result:
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
    }


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
        ([], "error: MODEL_NOT_FOUND: the server serves no model\n"),
        (["a", "b"], "error: FIELD_REQUIRED: name one of the served models with --model: a, b\n"),
    ],
)
def test_generate_without_model_needs_exactly_one(fake: FakeServer, served: list[str], line: str) -> None:
    fake.models = served
    result = run("generate", "hello", "--target", fake.target)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", line)


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
    assert result.stderr.startswith("error: DEADLINE_EXCEEDED: ")
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
    "flags", [["--target", "nowhere"], ["--max-tokens", "0"], ["--plan", "twice"], ["--timeout", "0"]]
)
def test_wrong_flags_are_named(flags: list[str]) -> None:
    result = run("generate", "hello", *flags)
    assert result.exit_code == 2
    assert flags[0] in result.stderr


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


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    settings: list[ServeSettings] = []

    def serve(given: ServeSettings) -> int:
        settings.append(given)
        return 3

    monkeypatch.setattr(service.server, "serve", serve)
    return settings


def test_serve_passes_flags_on_and_exits_with_the_gateways_code(served: list[ServeSettings]) -> None:
    flags = ["--model", "m.gguf", "--workers", "2", "--listen", "127.0.0.1:0", "--kernels", "triton"]
    flags += ["--decode-plan", "replan", "--kv-blocks", "64", "--max-step-tokens", "128", "--threads", "1"]
    flags += ["--log-level", "debug", "--worker-address", "a:1", "--worker-address", "b:2"]
    assert run("serve", *flags).exit_code == 3
    expected = {
        "model": "m.gguf",
        "workers": 2,
        "listen": "127.0.0.1:0",
        "kernels": "triton",
        "decode_plan": "replan",
        "kv_blocks": 64,
        "max_step_tokens": 128,
        "threads": 1,
        "log_level": "debug",
        "worker_addresses": ("a:1", "b:2"),
    }
    assert {name: getattr(served[0], name) for name in expected} == expected


def test_serve_takes_the_environment_and_a_flag_wins(served: list[ServeSettings]) -> None:
    env = {"PAGECAST_KV_BLOCKS": "32", "PAGECAST_WORKERS": "4", "PAGECAST_WORKER_ADDRESS": "a:1,b:2"}
    assert run("serve", "--workers", "2", **env).exit_code == 3
    assert (served[0].kv_blocks, served[0].workers, served[0].worker_addresses) == (32, 2, ("a:1", "b:2"))


@pytest.mark.parametrize(
    ("flags", "env", "named"),
    [
        (["--workers", "0"], {}, "--workers (PAGECAST_WORKERS)"),
        (["--listen", "nowhere"], {}, "--listen (PAGECAST_LISTEN)"),
        (["--worker-address", "x"], {}, "--worker-address (PAGECAST_WORKER_ADDRESS)"),
        ([], {"PAGECAST_KV_BLOCKS": "many"}, "--kv-blocks (PAGECAST_KV_BLOCKS)"),
        ([], {"PAGECAST_WORKER_ADDRESS": "x"}, "--worker-address (PAGECAST_WORKER_ADDRESS)"),
    ],
)
def test_serve_names_a_wrong_setting_in_one_line(
    served: list[ServeSettings], flags: list[str], env: dict[str, str], named: str
) -> None:
    result = run("serve", *flags, **env)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {named}: ")
    assert len(result.stderr.splitlines()) == 1
    assert served == []


def waiting_shows(*, terminal: bool, stop_after_s: float) -> str:
    out = io.StringIO()
    with Waiting(Console(file=out, force_terminal=terminal), "waiting", delay_s=0.1) as waiting:
        time.sleep(stop_after_s)
        waiting.stop()
        time.sleep(0.2)
    return out.getvalue()


@pytest.mark.parametrize(
    ("terminal", "stop_after_s", "shown"), [(True, 0.3, True), (True, 0.0, False), (False, 0.3, False)]
)
def test_the_spinner_shows_late_and_on_a_terminal_only(
    *, terminal: bool, stop_after_s: float, shown: Any
) -> None:
    assert ("waiting" in waiting_shows(terminal=terminal, stop_after_s=stop_after_s)) is shown
