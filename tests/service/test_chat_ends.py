"""What `pagecast chat` and `generate` say at a terminal of a reply that has no end of its own."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pagecast.v1 import generation_pb2
from tests.client.fake_server import FakeServer, Refusal
from tests.service.terminal_session import TerminalSession

PROMPT = "\n> "


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def chat(fake: FakeServer, tmp_path: Path, *flags: str) -> TerminalSession:
    return TerminalSession("chat", "--target", fake.target, *flags, home=tmp_path)


@pytest.mark.parametrize(("rolls_back", "fate"), [
    (False, "cut short; what came by then stays in the history"),
    (True, "nothing of this turn is in the history"),
])  # fmt: skip
def test_a_deadline_tells_what_became_of_the_turn(
    fake: FakeServer, tmp_path: Path, *, rolls_back: bool, fate: str
) -> None:
    fake.hold_after, fake.rolls_back = 2, rolls_back
    with chat(fake, tmp_path, "--timeout", "0.5") as terminal:
        terminal.until(PROMPT)
        terminal.type("hello\n")
        terminal.until("hello\nhe\nerror: DEADLINE_EXCEEDED: the deadline of 0.5 s passed\n" + fate + PROMPT)
        assert bytes(fake.log["ses_0"]) == (b"" if rolls_back else b"hellohe")


def test_a_failed_reply_tells_that_nothing_stays(fake: FakeServer, tmp_path: Path) -> None:
    fake.fail_after, fake.failure = 2, Refusal(grpc.StatusCode.INTERNAL, "NUMERIC_FAILURE", "not finite")
    with chat(fake, tmp_path) as terminal:
        terminal.until(PROMPT)
        terminal.type("hello\n")
        terminal.until(
            "he\nerror: NUMERIC_FAILURE: not finite\nnothing of this turn is in the history" + PROMPT
        )


def test_a_full_context_is_told_each_time(fake: FakeServer, tmp_path: Path) -> None:
    full = generation_pb2.FINISH_REASON_CONTEXT_FULL
    with chat(fake, tmp_path) as terminal:
        terminal.until(PROMPT)
        fake.refusals["Generate"] = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "9 over 8")
        terminal.type("hello\n")
        terminal.until("error: PROMPT_TOO_LONG: 9 over 8" + PROMPT)  # a new session would not help
        del fake.refusals["Generate"]
        fake.end_reason = full
        terminal.type("hello\n")
        terminal.until("hello\nhello\nthe context is full; /new begins a new session" + PROMPT)
        fake.refusals["Generate"] = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "9 over 8")
        for _ in range(2):
            terminal.type("hello\n")
            terminal.until("error: PROMPT_TOO_LONG: 9 over 8\nthe context has no room for it; /new begins")
            terminal.until(PROMPT)


@pytest.mark.parametrize(
    ("reason", "line"),
    [("MAX_TOKENS", "ended at --max-tokens"), ("TIME_LIMIT", "ended at --time-limit")],
)
def test_a_reply_that_ended_at_a_limit_says_so(
    fake: FakeServer, tmp_path: Path, reason: str, line: str
) -> None:
    fake.end_reason = generation_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
    with chat(fake, tmp_path, "--show-timing") as terminal:
        terminal.until(PROMPT)
        terminal.type("hello\n")
        terminal.until(f"hello\nhello\n{line}\nTTFT ")
        terminal.until(f" cached, {reason}" + PROMPT)
    with TerminalSession("generate", "hello", "--target", fake.target, home=tmp_path) as terminal:
        assert terminal.wait() == 0
        assert terminal.shown == f"hello\n{line}\n"
    with TerminalSession("generate", "hello", "--target", fake.target, "--json", home=tmp_path) as terminal:
        assert terminal.wait() == 0
        assert line not in terminal.shown
