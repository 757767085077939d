"""`pagecast chat` without a terminal: each line of standard input is a turn, only replies are printed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
from click.testing import CliRunner, Result

import pagecast
from pagecast.v1 import generation_pb2, session_pb2
from service.cli import main
from service.commands.interrupts import Interrupts
from tests.client.fake_server import FakeServer, Refusal

CLOSED = session_pb2.SESSION_STATE_CLOSED


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def run(fake: FakeServer, *flags: str, stdin: str | bytes) -> Result:
    return CliRunner().invoke(main, ["chat", *flags], input=stdin, env={"PAGECAST_TARGET": fake.target})


def test_a_line_is_a_turn_and_blank_ones_are_none(fake: FakeServer) -> None:
    result = run(fake, "--temperature", "0.5", stdin="one\r\n\n  \ntwo /quit\n/quit\nlast")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "one\ntwo /quit\n/quit\nlast\n"
    assert bytes(fake.log["ses_0"]) == b"oneonetwo /quittwo /quit/quit/quitlastlast"
    assert (len(fake.state), fake.state["ses_0"].state) == (1, CLOSED)
    requests = [request for request in fake.requests if isinstance(request, generation_pb2.GenerateRequest)]
    assert [request.sampling.temperature for request in requests] == [0.5] * 4


def test_no_line_is_no_turn(fake: FakeServer) -> None:
    result = run(fake, stdin="")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert fake.state["ses_0"].state == CLOSED


def test_the_system_message_comes_once_with_the_first_turn_that_stays(fake: FakeServer) -> None:
    assert run(fake, "--system", "sys: ", stdin="a\nb\n").stdout == "sys: a\nb\n"
    request = next(r for r in fake.requests if isinstance(r, generation_pb2.GenerateRequest))
    roles = [message.role for message in request.input.messages.messages]
    assert roles == [session_pb2.ROLE_SYSTEM, session_pb2.ROLE_USER]


def test_timing_goes_to_standard_error(fake: FakeServer) -> None:
    result = run(fake, "--show-timing", stdin="abc\nd\n")
    assert result.stdout == "abc\nd\n"
    first, second = result.stderr.splitlines()
    assert first.startswith("TTFT ")
    assert first.endswith(", 3 tokens out, 3 in, 0 cached, EOS")
    assert second.endswith(", ITL -, 1 tokens out, 1 in, 5 cached, EOS")


@pytest.mark.parametrize(("reason", "code"), [("PROMPT_TOO_LONG", "INVALID_ARGUMENT"), ("", "UNAVAILABLE")])
def test_a_turn_that_fails_ends_it(fake: FakeServer, reason: str, code: str) -> None:
    fake.refusals["Generate"] = Refusal(grpc.StatusCode[code], reason)
    result = run(fake, stdin="a\nb\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {reason or code}: ")
    assert fake.state["ses_0"].state == CLOSED


def test_a_lost_session_ends_it_since_a_script_would_not_know(fake: FakeServer) -> None:
    fake.fail_after = 3
    result = run(fake, stdin="ab\ncdefg\nh\n")
    assert (result.exit_code, result.stdout) == (1, "ab\ncde\n")
    assert result.stderr == "error: WORKER_LOST: refused by the test\n"
    assert len(fake.state) == 1


def test_bytes_that_are_no_text_end_it_after_what_came_before(fake: FakeServer) -> None:
    result = run(fake, stdin=b"ab\nc\xff\n")
    assert (result.exit_code, result.stdout) == (2, "ab\n")
    assert result.stderr == "error: TEXT: standard input is not UTF-8 at byte 4\n"
    assert fake.state["ses_0"].state == CLOSED


def test_replies_come_while_the_pipe_is_open_and_ctrl_c_ends_it(fake: FakeServer) -> None:
    command = [sys.executable, "-m", "service.cli", "chat", "--target", fake.target]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"hello\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"hello\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
        finally:
            process.kill()
    assert fake.state["ses_0"].state == CLOSED


def test_a_reply_that_ended_by_itself_leaves_ctrl_c_as_it_was(fake: FakeServer) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pagecast.Client(fake.target) as client:
        session = client.open_session("tiny")
        with (
            Interrupts() as interrupts,
            session.generate("abc") as generation,
            interrupts.cancelling(session, generation),
        ):
            assert signal.getsignal(signal.SIGINT) is not before
            assert generation.wait().text == "abc"
            os.kill(os.getpid(), signal.SIGINT)  # too late: nothing runs, and nothing is raised
    assert signal.getsignal(signal.SIGINT) is before
