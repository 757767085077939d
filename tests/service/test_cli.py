"""The client commands against a small real server."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from pagecast.v1 import session_pb2
from service.cli import main
from tests.client.fake_server import FakeServer, Refusal

STARTED = "from service.cli import main; print('started', flush=True); main()"


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


@pytest.mark.parametrize(
    "command",
    [["generate", "hello"], ["models"], ["chat"], ["sessions", "list"], ["sessions", "get", "ses_0"],
     ["sessions", "close", "a", "b"], ["sessions", "update", "a", "--plan", "once"], ["tokenize", "a"],
     ["detokenize", "1"]],
)  # fmt: skip
def test_no_server_says_how_to_start_one(command: list[str]) -> None:
    result = run(*command, "--target", "127.0.0.1:1")
    line = "error: UNAVAILABLE: no server answers at 127.0.0.1:1; start one with: pagecast serve\n"
    assert (result.exit_code, result.stderr) == (1, line)


def test_a_port_that_accepts_and_does_not_answer_is_told_apart(fake: FakeServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # How long gRPC gives a connection until it has come about.
        options = [("grpc.min_reconnect_backoff_ms", 300)]
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        with grpc.insecure_channel(target, options=options) as channel, pytest.raises(grpc.RpcError) as error:
            channel.unary_unary("/any/call")(b"", timeout=10)
    words: str = error.value.details()
    fake.refusals["ListModels"] = Refusal(grpc.StatusCode.UNAVAILABLE, message=words)
    result = run("models", "--target", fake.target)
    line = f"error: UNAVAILABLE: {fake.target} accepts connections and does not answer\n"
    assert (result.exit_code, result.stderr) == (1, line)


def test_a_server_without_worker_keeps_its_own_words(fake: FakeServer) -> None:
    fake.refusals["OpenSession"] = Refusal(grpc.StatusCode.UNAVAILABLE, "NO_WORKER", "no worker is live")
    result = run("generate", "hello", "--target", fake.target)
    assert (result.exit_code, result.stderr) == (1, "error: NO_WORKER: no worker is live\n")


def test_an_address_of_the_wrong_form_is_told_in_our_words() -> None:
    line = "error: --target (PAGECAST_TARGET): expected HOST:PORT, got 'nowhere'\n"
    assert run("models", "--target", "nowhere").stderr == line


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


@pytest.mark.parametrize(
    "command",
    [["generate", "-"], ["tokenize", "-"], ["detokenize", "-"], ["chat"]],
    ids=lambda words: words[0],
)
def test_ctrl_c_while_standard_input_is_read(fake: FakeServer, command: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTED, *command, "--target", fake.target],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == b"started\n"
            time.sleep(0.5)  # it reads what nobody writes
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
            assert process.stderr.read() == b""
        finally:
            process.kill()


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_closes_the_session_first(fake: FakeServer, number: int) -> None:
    fake.hold_after = 2
    command = [sys.executable, "-m", "service.cli", "generate", "hello", "--target", fake.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(2) == b"he"
            process.send_signal(number)
            assert process.wait(10) == 128 + number
        finally:
            process.kill()
    assert fake.state["ses_0"].state == session_pb2.SESSION_STATE_CLOSED


@pytest.mark.parametrize(
    "command",
    [[], ["serve"], ["generate"], ["models"], ["chat"], ["sessions"], ["sessions", "list"], ["tokenize"]],
)
def test_short_help_works_everywhere(command: list[str]) -> None:
    result = run(*command, "-h")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_help_on_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "service.cli", "serve", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")
