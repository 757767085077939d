import io
import json
import subprocess
import sys
import threading
from typing import Any

import pytest

from pagecast._log import LogWriter, open_log
from pagecast.v1 import generation_pb2, session_pb2
from service.telemetry.generations import GenerationRecord


def lines_of(stream: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


class BlockedStream(io.BytesIO):
    """Takes nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, data: Any) -> int:
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
    assert writer.num_dropped >= 17
    dropped = writer.num_dropped
    stream.released.set()
    writer.close()
    (told,) = [line for line in lines_of(stream) if line["event"] == "log_lines_dropped"]
    assert told["num_lines"] == dropped
    assert len(lines_of(stream)) == 20 - dropped + 1


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


def test_times_of_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1_000, 4_000, 7_000, 10_000, 12_000])
    monkeypatch.setattr("service.telemetry.generations.time.monotonic_ns", lambda: next(clock))
    record = GenerationRecord("ses", "gen")
    for index in range(3):
        chunk = generation_pb2.TokenChunk(tokens=[generation_pb2.Token(id=index)])
        record.observe(generation_pb2.GenerateResponse(chunk=chunk))
    finished = generation_pb2.GenerationFinished(
        finish_reason=generation_pb2.FINISH_REASON_MAX_TOKENS,
        usage=generation_pb2.Usage(input_tokens=5, cached_tokens=4),
        plan_stats=session_pb2.PlanStats(builds=1, reuses=2, replans=0),
    )
    record.observe(generation_pb2.GenerateResponse(finished=finished))
    stream = io.BytesIO()
    with LogWriter(stream) as writer:
        record.log(open_log(writer, "info"), "OK")
    (line,) = lines_of(stream)
    assert (line["ttft_ns"], line["tpot_ns"], line["e2e_ns"]) == (3_000, 3_000, 11_000)
    assert (line["input_tokens"], line["cached_tokens"], line["output_tokens"]) == (5, 4, 3)
    assert (line["plan_builds"], line["plan_reuses"], line["plan_replans"]) == (1, 2, 0)
    assert (line["finish_reason"], line["error_reason"]) == ("MAX_TOKENS", None)


def test_a_generation_that_was_refused_tells_why_and_what_is_not_known() -> None:
    stream = io.BytesIO()
    with LogWriter(stream) as writer:
        GenerationRecord("ses", "gen").log(
            open_log(writer, "info"), "RESOURCE_EXHAUSTED", error_reason="KV_EXHAUSTED"
        )
    (line,) = lines_of(stream)
    assert (line["status"], line["error_reason"]) == ("RESOURCE_EXHAUSTED", "KV_EXHAUSTED")
    unknown = ("ttft_ns", "tpot_ns", "input_tokens", "cached_tokens", "finish_reason", "plan_builds")
    assert [line[name] for name in unknown] == [None] * len(unknown)
