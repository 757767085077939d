"""What reaches standard output, or says that it could not; what shows while waiting."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pagecast.v1 import session_pb2
from service.terminal import Output, Waiting, _Elapsed, visible
from tests.client.fake_server import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def pagecast_to(stdout: Any, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "service.cli", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False, **options)


@pytest.mark.parametrize("arguments", [["generate", "hello"], ["generate", "hello", "--json"], ["models"]])
def test_output_to_a_full_device_is_one_line(fake: FakeServer, arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = pagecast_to(full, *arguments, "--target", fake.target)
    line = b"error: OUTPUT_FAILED: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert all(state.state == session_pb2.SESSION_STATE_CLOSED for state in fake.state.values())


def test_output_to_a_closed_pipe_ends_the_turn_and_the_session(fake: FakeServer) -> None:
    fake.hold_after = 3
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = pagecast_to(writer, "generate", "hello", "--target", fake.target)
    finally:
        os.close(writer)
    line = b"error: OUTPUT_FAILED: cannot write to standard output: Broken pipe\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert fake.ended.wait(5)
    assert fake.state["ses_0"].state == session_pb2.SESSION_STATE_CLOSED


def test_closed_standard_streams_are_told(fake: FakeServer) -> None:
    command = [sys.executable, "-m", "service.cli", "generate", "-", "--target", fake.target]
    for closing, code, words in (
        ("<&-", 2, "TEXT: standard input is closed"),
        (">&-", 1, "cannot write to standard output: it is closed"),
    ):
        shell = ["sh", "-c", f'exec "$@" {closing}', "sh"]
        done = subprocess.run(
            [*shell, *command], input=b"hello", capture_output=True, timeout=60, check=False
        )
        assert done.returncode == code
        assert words in done.stderr.decode()


def test_a_terminal_that_cannot_spell_the_text_gets_what_it_can(fake: FakeServer) -> None:
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = pagecast_to(subprocess.PIPE, "generate", "h\u00e9", "--target", fake.target, env=env)
    assert (done.returncode, done.stdout) == (0, b"h?\n")
    done = pagecast_to(subprocess.PIPE, "generate", "h\u00e9", "--target", fake.target, "--json", env=env)
    assert json.loads(done.stdout)["text"] == "h\u00e9"


def test_the_spinner_shows_late_on_a_terminal() -> None:
    out = io.StringIO()
    with Waiting(Console(file=out, force_terminal=True), "waiting", delay_s=0.01):
        deadline = time.monotonic() + 10.0
        while "waiting" not in out.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(("terminal", "delay_s"), [(True, 3600.0), (False, 0.0)])
def test_the_spinner_shows_neither_early_nor_elsewhere(*, terminal: bool, delay_s: float) -> None:
    out = io.StringIO()
    before = threading.active_count()
    with Waiting(Console(file=out, force_terminal=terminal), "waiting", delay_s=delay_s) as waiting:
        waiting.stop()
    deadline = time.monotonic() + 10.0
    while threading.active_count() > before:  # stopping ends the timer, however long it had to go
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "waiting" not in out.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_control_characters_and_a_pipe_gets_all() -> None:
    text = "a\x1b[2J\x07\x9b\x7f\r\n\tb \U0001f469\u200d\U0001f680"
    for stream, expected in (
        (io.StringIO(), text),
        (Terminal(), "a\ufffd[2J\ufffd\ufffd\ufffd\ufffd\n\tb \U0001f469\u200d\U0001f680"),
    ):
        Output(stream).write(text)
        assert stream.getvalue() == expected


def test_visible_text_is_one_line() -> None:
    assert visible("h\u00e9 \U0001f680\n\x1b\u202e\u2028") == "h\u00e9 \U0001f680\\n\\x1b\\u202e\\u2028"


def test_a_table_is_columns_in_a_pipe_and_drawn_on_a_terminal() -> None:
    rows = [("\u6f22\u5b57", "1", "[b]x"), ("ab", "22", "")]
    for stream in (io.StringIO(), Terminal()):
        Output(stream).table(("name", "count", "end"), rows, ("count",))
        shown = stream.getvalue()
        assert "[b]x" in shown
        if not stream.isatty():
            assert shown == "name  count  end\n\u6f22\u5b57      1  [b]x\nab       22\n"
        else:
            assert "\u2500" in shown


def test_the_spinner_counts_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    elapsed = _Elapsed("waiting")
    now_s[0] = 107.4
    assert elapsed.__rich__().plain == "waiting, 7 s"
