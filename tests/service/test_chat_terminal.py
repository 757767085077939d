"""`pagecast chat` at a real (pseudo) terminal: prompt, replies, Ctrl-C, commands, lost sessions."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pagecast.v1 import generation_pb2, session_pb2
from tests.client.fake_server import FakeServer, Refusal
from tests.e2e.processes import wait_until
from tests.service.terminal_session import CTRL_C, CTRL_D, TerminalSession

CLOSED = session_pb2.SESSION_STATE_CLOSED
PROMPT = "\n> "
# At a prompt Python looks for signals, then waits for a key: what comes in between it sees with the
# next key. Nobody is so quick after what is shown but a test.
SETTLE_S = 0.2
USAGES = {
    "/plan": "/plan once|replan", "/info": "/info", "/new": "/new", "/help": "/help", "/quit": "/quit",
}  # fmt: skip


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def chat(fake: FakeServer, tmp_path: Path, *flags: str) -> TerminalSession:
    return TerminalSession("chat", "--target", fake.target, *flags, home=tmp_path)


def num_cancels(fake: FakeServer) -> int:
    return sum(isinstance(request, generation_pb2.CancelGenerationRequest) for request in fake.requests)


def test_turns_share_a_session_and_ctrl_d_closes_it(fake: FakeServer, tmp_path: Path) -> None:
    with chat(fake, tmp_path, "--system", "be brief", "--show-timing", "--max-tokens", "20") as terminal:
        terminal.until(PROMPT)
        terminal.type("hello\n")
        assert terminal.until("\nTTFT") == "hello\nbe briefhello"
        assert " ms, 13 tokens out, 13 in, 0 cached" in terminal.until(PROMPT)
        terminal.type("//slash\n")
        assert terminal.until("\nTTFT") == "//slash\n/slash"
        assert " 6 tokens out, 6 in, 25 cached" in terminal.until(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert fake.state["ses_0"].state == CLOSED
    assert len(fake.state) == 1
    request = fake.last(generation_pb2.GenerateRequest)
    assert request.cancel_policy == generation_pb2.CANCEL_POLICY_KEEP_PARTIAL
    assert request.stopping.max_tokens == 20


def test_ctrl_c_cuts_a_reply_and_keeps_what_was_shown(fake: FakeServer, tmp_path: Path) -> None:
    fake.hold_after = 2
    with chat(fake, tmp_path) as terminal:
        terminal.until(PROMPT)
        terminal.type("hello\n")
        terminal.until("hello\nhe")
        terminal.type(CTRL_C)
        terminal.until("cut short; what was shown stays in the history")
        terminal.until(PROMPT)
        assert bytes(fake.log["ses_0"]) == b"hellohe"
        fake.hold_after = None
        terminal.type("more\n")
        terminal.until("more\nmore" + PROMPT)
        assert bytes(fake.log["ses_0"]) == b"hellohemoremore"
        assert fake.state["ses_0"].state != CLOSED
        terminal.type("/quit\n")
        assert terminal.wait() == 0
    assert fake.state["ses_0"].state == CLOSED
    assert num_cancels(fake) == 1


def test_ctrl_c_before_the_first_token_and_twice(fake: FakeServer, tmp_path: Path) -> None:
    fake.hold_after = 0
    with chat(fake, tmp_path) as terminal:
        terminal.until(PROMPT)
        terminal.type("hello\n")
        terminal.until("waiting for the first token, 1 s")  # the spinner
        terminal.type(CTRL_C)
        terminal.until("cut short")
        terminal.until(PROMPT)
        # The server does not heed the cancel: the second Ctrl-C ends the call on this side.
        fake.ignores_cancels = True
        fake.hold_after = 1
        terminal.type("hello\n")
        terminal.until("hello\nh")
        terminal.type(CTRL_C)
        # Two signals at once would be one.
        wait_until(lambda: num_cancels(fake) == 2, 20.0)
        assert not fake.ended.is_set()
        terminal.type(CTRL_C)
        terminal.until("cut short; what came by then stays in the history")
        terminal.until(PROMPT)
        assert bytes(fake.log["ses_0"]) == b"hellohelloh"
        # A cancel that cannot be sent does so too.
        fake.refusals["CancelGeneration"] = Refusal(grpc.StatusCode.INTERNAL, "INTERNAL")
        terminal.type("hello\n")
        terminal.until("hello\nh")
        terminal.type(CTRL_C)
        terminal.until("cut short; what came by then stays in the history")
        terminal.until(PROMPT)
        assert "error" not in terminal.shown
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_ctrl_c_at_the_prompt(fake: FakeServer, tmp_path: Path) -> None:
    with chat(fake, tmp_path) as terminal:
        terminal.until(PROMPT)
        terminal.type("half a li")
        terminal.until("half a li")
        time.sleep(SETTLE_S)
        terminal.type(CTRL_C)
        terminal.until(PROMPT)
        terminal.type("hi\n")
        terminal.until("hi\nhi" + PROMPT)
        assert bytes(fake.log["ses_0"]) == b"hihi"
        # Whatever comes between, two of them are not in a row.
        for keys in (["\n"], ["x", CTRL_C]):
            time.sleep(SETTLE_S)
            terminal.type(CTRL_C)
            terminal.until("\nCtrl-C again, Ctrl-D or /quit ends" + PROMPT)
            for key in keys:
                time.sleep(SETTLE_S)
                terminal.type(key)
            terminal.until(PROMPT)
        time.sleep(SETTLE_S)
        terminal.type(CTRL_C)
        terminal.until("\nCtrl-C again, Ctrl-D or /quit ends" + PROMPT)
        time.sleep(SETTLE_S)
        terminal.type(CTRL_C)
        assert terminal.wait() == 130
    assert fake.state["ses_0"].state == CLOSED


def test_commands(fake: FakeServer, tmp_path: Path) -> None:
    with chat(fake, tmp_path, "--plan", "once") as terminal:
        terminal.until(PROMPT)
        terminal.type("/plan replan\n")
        terminal.until("plan: replan")
        assert fake.state["ses_0"].decode_plan == session_pb2.PAGED_DECODE_PLAN_REPLAN
        terminal.type("/info\n")
        terminal.until("plan:        replan")
        terminal.type("/help\n")
        terminal.until("/quit")
        terminal.type("/plan\n")
        terminal.until("/plan\nplan: replan" + PROMPT)
        for name, usage in USAGES.items():
            for wrong in ("twice", "once once"):
                terminal.type(f"{name} {wrong}\n")
                terminal.until(f"{name} {wrong}\nusage: {usage}" + PROMPT)
        terminal.type("/nothing x\n")
        terminal.until("error: no command '/nothing'; /help lists them" + PROMPT)
        terminal.type("/new\n")
        terminal.until("session ses_1")
        assert (fake.state["ses_0"].state, fake.state["ses_1"].state) == (
            CLOSED,
            session_pb2.SESSION_STATE_ACTIVE,
        )
        assert fake.state["ses_1"].decode_plan == session_pb2.PAGED_DECODE_PLAN_REPLAN
        terminal.type("/quit\n")
        assert terminal.wait() == 0
    assert not any(isinstance(request, generation_pb2.GenerateRequest) for request in fake.requests)


def test_a_lost_worker_is_told_and_a_new_session_goes_on(fake: FakeServer, tmp_path: Path) -> None:
    with chat(fake, tmp_path, "--system", "sys") as terminal:
        terminal.until(PROMPT)
        fake.fail_after = 5
        fake.refusals["OpenSession"] = Refusal(grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
        fake.models = []
        terminal.type("hello\n")
        terminal.until("syshe")
        terminal.until("the session is gone (WORKER_LOST: refused by the test)")
        terminal.until("empty history")
        terminal.until("waiting for a worker")
        fake.fail_after = None
        fake.models = ["tiny"]
        del fake.refusals["OpenSession"]
        terminal.until(PROMPT)
        terminal.type("again\n")
        terminal.until("again\nsysagain" + PROMPT)  # with its system message again
        fake.state["ses_1"].state = session_pb2.SESSION_STATE_FAILED
        terminal.type("third\n")
        terminal.until("the session is gone (SESSION_FAILED: its worker is gone)")
        terminal.until(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert [state.state for state in fake.state.values()] == [CLOSED] * 3


def test_a_refused_turn_is_told_and_the_session_goes_on(fake: FakeServer, tmp_path: Path) -> None:
    with chat(fake, tmp_path, "--system", "sys:") as terminal:
        terminal.until(PROMPT)
        fake.refusals["Generate"] = Refusal(
            grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "9 over\x1b[2J 8", "input"
        )
        terminal.type("hello\n")
        terminal.until("error: PROMPT_TOO_LONG: 9 over\\x1b[2J 8 (field input)")
        del fake.refusals["Generate"]
        terminal.type("hello\n")
        terminal.until("hello\nsys:hello" + PROMPT)  # what was refused left nothing
        terminal.type("more\n")
        terminal.until("more\nmore" + PROMPT)
        assert len(fake.state) == 1


SERVE = """
import time
from tests.client.fake_server import FakeServer
with FakeServer() as fake:
    print(fake.target, flush=True)
    time.sleep(60)
"""


def test_a_server_that_is_gone_ends_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            target = server.stdout.readline().decode().strip()
            with TerminalSession("chat", "--target", target, home=tmp_path) as terminal:
                terminal.until(PROMPT)
                server.kill()
                server.wait(5)
                terminal.type("hello\n")
                terminal.until(f"error: UNAVAILABLE: no server answers at {target}")
                assert terminal.wait() == 1
        finally:
            server.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_closes_the_session(fake: FakeServer, tmp_path: Path, number: int) -> None:
    with chat(fake, tmp_path) as terminal:
        terminal.until(PROMPT)
        time.sleep(SETTLE_S)
        terminal.process.send_signal(number)
        assert terminal.wait() == 128 + number
    assert fake.state["ses_0"].state == CLOSED


def test_replies_and_labels_cannot_move_the_cursor(fake: FakeServer, tmp_path: Path) -> None:
    with TerminalSession("generate", "a\x1b[2Jb\tc", "--target", fake.target, home=tmp_path) as terminal:
        assert terminal.wait() == 0
        assert "a\ufffd[2Jb" in terminal.shown
        assert b"\x1b[2J" not in terminal.raw
    fake.state["ses_0"].labels["k"] = "\x1b[2J[/red]"
    with TerminalSession("sessions", "list", "--target", fake.target, home=tmp_path) as terminal:
        assert terminal.wait() == 0
        assert "ses_0" in terminal.shown
        assert "\u2500" in terminal.shown  # a table with lines
        assert b"\x1b[2J" not in terminal.raw
