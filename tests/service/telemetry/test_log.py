import io
import json
import subprocess
import sys
import threading
from typing import Any

import pytest

from pagecast._log import LogWriter, open_log


def lines_of(stream: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


class BlockedStream(io.BytesIO):
    """Takes nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.released = threading.Event()

    def write(self, data: Any) -> int:
        self.reached.set()
        self.released.wait(5)
        return super().write(data)


def test_one_event_is_one_line_whatever_it_holds() -> None:
    stream = io.BytesIO()
    with LogWriter(stream) as writer:
        log = open_log(writer, "info")
        log.info("a", text='x\n{"event":"forged"}\r\u2028', lone="\udcff", huge=2**80, odd=object())
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            log.exception("b")
        log.debug("c")
    first, second = lines_of(stream)
    assert stream.getvalue().count(b"\n") == 2
    assert (first["event"], first["huge"]) == ("a", 2**80)
    assert first["text"].startswith('x\n{"event"')
    assert "level" not in first
    assert (second["event"], second["level"]) == ("b", "error")
    assert "first\nsecond" in second["exception"]


def test_a_full_queue_drops_lines_and_says_how_many() -> None:
    stream = BlockedStream()
    writer = LogWriter(stream, queue_lines=2)
    log = open_log(writer, "info")
    for index in range(20):
        log.info("line", index=index)
        assert index or stream.reached.wait(5)  # the first is with the thread, which waits
    assert writer.num_dropped == 17
    stream.released.set()
    writer.close()
    (told,) = [line for line in lines_of(stream) if line["event"] == "log_lines_dropped"]
    assert told["num_lines"] == 17
    assert len(lines_of(stream)) == 3 + 1


class CountedStream(io.BytesIO):
    """Notes what lies between two flushes, and takes nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.pieces: list[bytes] = []

    def write(self, data: Any) -> int:
        self.released.wait(5)
        return super().write(data)

    def flush(self) -> None:
        if whole := self.getvalue()[sum(map(len, self.pieces)) :]:
            self.pieces.append(whole)


def test_lines_that_wait_go_out_in_few_whole_pieces() -> None:
    stream = CountedStream()
    with LogWriter(stream) as writer:
        log = open_log(writer, "info")
        for index in range(50):
            log.info("line", index=index, text="x" * 200)
        log.info("long", text="y" * 9000)
        stream.released.set()
    assert [line.get("index") for line in lines_of(stream)] == [*range(50), None]
    assert all(piece.endswith(b"\n") for piece in stream.pieces)
    assert max(len(piece) for piece in stream.pieces[:-1]) <= 4096
    assert stream.pieces[-1].count(b"\n") == 1
    assert len(stream.pieces) <= 6


class FailingStream(io.BytesIO):
    """Takes lines and never lets them go."""

    def flush(self) -> None:
        raise BrokenPipeError


def test_lines_that_never_went_out_are_counted() -> None:
    writer = LogWriter(FailingStream())
    log = open_log(writer, "info")
    for _ in range(7):
        log.info("x")
    writer.close()
    assert writer.num_dropped >= 7


def test_events_that_come_together_are_what_each_alone_is() -> None:
    stream, each = io.BytesIO(), [{"n": 1, "lone": "\udcff"}, {"n": 2}]
    with LogWriter(stream) as writer:
        log = open_log(writer, "info")
        for values in each:
            log.info("x", **values)
        log.info_all("x", each)
        log.bind(worker="w").info_all("x", each)
    lines = lines_of(stream)
    assert [list(line) for line in lines[2:4]] == [list(line) for line in lines[:2]]
    assert lines[2]["ts"] == lines[3]["ts"] >= lines[1]["ts"]
    told = [{name: value for name, value in line.items() if name != "ts"} for line in lines]
    assert told[2:4] == told[:2]
    assert told[4:] == [{"worker": "w"} | line for line in told[:2]]


def test_events_below_the_level_are_no_lines_together_either() -> None:
    stream = io.BytesIO()
    with LogWriter(stream) as writer:
        open_log(writer, "warning").info_all("x", [{"n": 1}])
    assert stream.getvalue() == b""


def test_a_full_queue_counts_lines_and_not_groups() -> None:
    stream = BlockedStream()
    writer = LogWriter(stream, queue_lines=4)
    group = (b'{"event":"a"}', b'{"event":"b"}', b'{"event":"c"}')
    for index in range(8):
        writer.write(*group)
        assert index or stream.reached.wait(5)  # the first is with the thread, which waits
    # Behind the second there is room for one line, and so for the third.
    assert writer.num_dropped == 5 * 3
    stream.released.set()
    writer.close()
    (told,) = [line for line in lines_of(stream) if line["event"] == "log_lines_dropped"]
    assert told["num_lines"] == 15
    assert len(lines_of(stream)) == 9 + 1


class UnbufferedStream(io.BytesIO):
    """Counts what would be calls to the system."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0

    def write(self, data: Any) -> int:
        self.num_writes += 1
        return super().write(data)


def test_a_group_is_written_in_few_pieces_also_where_the_stream_has_no_buffer() -> None:
    stream = UnbufferedStream()
    with LogWriter(stream) as writer:
        open_log(writer, "info").info_all("x", [{"n": n, "text": "x" * 400} for n in range(16)])
    assert [line["n"] for line in lines_of(stream)] == list(range(16))
    assert stream.num_writes == 2


def test_a_broken_stream_ends_nothing() -> None:
    stream = io.BytesIO()
    stream.close()
    writer = LogWriter(stream)
    open_log(writer, "info").info("x")
    writer.close()
    assert writer.num_dropped >= 1


def test_a_line_after_the_end_is_written_at_once() -> None:
    stream = io.BytesIO()
    with LogWriter(stream) as writer:
        log = open_log(writer, "info")
        log.info("a")
    log.info("b")
    assert [line["event"] for line in lines_of(stream)] == ["a", "b"]


# What each way to standard error is, and what its one event has to tell.
WAYS: dict[str, tuple[str, dict[str, object]]] = {
    "logging": (
        "logging.getLogger('lib.part').error('%d\\nlines', 2)",
        {"event": "python_log", "logger": "lib.part", "level": "error", "message": "2\nlines"},
    ),
    "logging with wrong arguments": (
        "logging.getLogger('lib').warning('%d', 'x')",
        {"event": "python_log", "logger": "lib", "level": "warning", "message": "%d ('x',)"},
    ),
    "logging at a level of its own": (
        "logging.getLogger('lib').log(45, 'x')",
        {"event": "python_log", "level": "error", "message": "x"},
    ),
    "a handler of a library": (
        "own = logging.StreamHandler(); own.handle(logging.makeLogRecord({'msg': 'one\\ntwo'}))",
        {"event": "python_log", "logger": "stderr", "message": "one\ntwo"},
    ),
    "print": (
        "print('a', 'b', file=sys.stderr)",
        {"event": "python_log", "logger": "stderr", "message": "a b"},
    ),
    "a line without an end": (
        "sys.stderr.write('half')",
        {"event": "python_log", "logger": "stderr", "message": "half"},
    ),
    "warnings": ("warnings.warn('old')", {"event": "python_log", "logger": "py.warnings"}),
    "a thread": (
        "t = threading.Thread(target=boom, name='t1'); t.start(); t.join()",
        {"event": "uncaught_exception", "thread": "t1", "level": "error"},
    ),
    "a finaliser": ("X(); gc.collect()", {"event": "uncaught_exception", "level": "error"}),
    "a task": (
        "asyncio.run(forget())",
        {"event": "python_log", "logger": "asyncio", "level": "error"},
    ),
    "a callback of the loop": ("asyncio.run(call_back())", {"event": "python_log", "logger": "asyncio"}),
    "the main thread": ("boom()", {"event": "uncaught_exception", "thread": "MainThread"}),
}
SCRIPT = """
import asyncio, gc, logging, sys, threading, warnings
from pagecast._process_log import process_log
def boom():
    raise ValueError("boom\\nsecond line")
class X:
    def __del__(self):
        boom()
async def fail():
    boom()
async def forget():
    task = asyncio.create_task(fail())
    await asyncio.sleep(0.01)
    task = None
    gc.collect()
async def call_back():
    asyncio.get_running_loop().call_soon(boom)
    await asyncio.sleep(0.01)
with process_log("info") as log:
    logging.getLogger("lib").debug("not at this level")
    {way}
"""


@pytest.mark.parametrize("way", WAYS)
def test_whatever_python_writes_is_one_event(way: str) -> None:
    code, told = WAYS[way]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{way}", code)], capture_output=True, timeout=30, check=False
    )
    (line,) = done.stderr.splitlines()
    event = json.loads(line)
    assert told.items() <= event.items()
    if way.startswith(("a thread", "a finaliser", "a task", "a callback", "the main")):
        assert "boom\nsecond line" in event["exception"]
    assert done.returncode == (1 if way == "the main thread" else 0)


def test_lost_lines_are_told_once_the_telling_is_out() -> None:
    class FailsOnce(io.BytesIO):
        def __init__(self) -> None:
            super().__init__()
            self.is_reached, self.may_go_on, self.num_writes = threading.Event(), threading.Event(), 0

        def write(self, data: Any) -> int:
            self.num_writes += 1
            self.is_reached.set()
            self.may_go_on.wait()
            if self.num_writes == 2:
                raise OSError("no space left")
            return super().write(data)

    stream = FailsOnce()
    with LogWriter(stream, queue_lines=10) as writer:
        log = open_log(writer, "info")
        log.info("first")
        stream.is_reached.wait()
        for index in range(100):
            log.info("later", index=index)
        stream.may_go_on.set()
    told = [line["num_lines"] for line in lines_of(stream) if line["event"] == "log_lines_dropped"]
    assert writer.num_dropped >= 90
    assert sum(told) == writer.num_dropped
