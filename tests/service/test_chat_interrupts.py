"""Ctrl-C in `pagecast chat` at moments when no reply streams: just after Enter, and during commands."""

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pagecast.v1 import session_pb2
from tests.client.fake_server import FakeServer, Refusal
from tests.service.terminal_session import CTRL_C, CTRL_D, TerminalSession

PROMPT = "\n> "
# After it Python waits for a key: what comes earlier at a prompt it may see with the next key only.
SETTLE_S = 0.1


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def chat(fake: FakeServer, tmp_path: Path) -> TerminalSession:
    return TerminalSession("chat", "--target", fake.target, home=tmp_path)


def test_ctrl_c_just_after_enter_never_ends_it(fake: FakeServer, tmp_path: Path) -> None:
    fake.hold_after = 2
    with chat(fake, tmp_path) as terminal:
        terminal.until(PROMPT)
        for tenths_ms in range(0, 100, 4):
            terminal.type("hello\n")
            time.sleep(tenths_ms / 10_000)
            terminal.type(CTRL_C)
            time.sleep(SETTLE_S)
            terminal.type("\n")
            time.sleep(SETTLE_S)
            terminal.type("/info\n")
            terminal.until("revision:", 5)
            terminal.until(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert fake.state["ses_0"].state == session_pb2.SESSION_STATE_CLOSED
    assert len(fake.state) == 1


def test_ctrl_c_while_a_turn_starts_sends_nothing(fake: FakeServer, tmp_path: Path) -> None:
    with chat(fake, tmp_path) as terminal:
        terminal.until(PROMPT)
        fake.delays_s["GetSession"] = 3.0
        terminal.type("hello\n")
        time.sleep(0.3)
        terminal.type(CTRL_C)
        terminal.until("cut short before it was sent; nothing of this turn is in the history" + PROMPT, 2)
        fake.delays_s.clear()
        terminal.type("more\n")
        terminal.until("more\nmore" + PROMPT)
        assert bytes(fake.log["ses_0"]) == b"moremore"
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_ctrl_c_leaves_a_command(fake: FakeServer, tmp_path: Path) -> None:
    with chat(fake, tmp_path) as terminal:
        terminal.until(PROMPT)
        calls = {"/info": "GetSession", "/plan": "GetSession", "/plan once": "UpdateSession"}
        for command, name in (calls | {"/new": "OpenSession"}).items():
            fake.delays_s[name] = 3.0
            terminal.type(f"{command}\n")
            time.sleep(0.3)
            terminal.type(CTRL_C)
            terminal.until("interrupted" + PROMPT, 2)
            fake.delays_s.clear()
        terminal.type("hello\n")
        terminal.until("hello\nhello" + PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_ctrl_c_while_a_worker_is_waited_for(fake: FakeServer, tmp_path: Path) -> None:
    with chat(fake, tmp_path) as terminal:
        terminal.until(PROMPT)
        fake.fail_after = 2
        fake.refusals["OpenSession"] = Refusal(grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
        terminal.type("hello\n")
        terminal.until("waiting for a worker")
        time.sleep(SETTLE_S)
        terminal.type(CTRL_C)
        terminal.until("interrupted; the next message looks for a worker again" + PROMPT, 3)
        fake.fail_after = None
        fake.refusals.clear()
        terminal.type("again\n")
        terminal.until("a new one begins")
        terminal.until(PROMPT)
        terminal.type("third\n")
        terminal.until("third\nthird" + PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
