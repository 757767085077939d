"""JSON lines on a byte stream, written by a thread of their own.

Knows how an event becomes one line; does not know what events mean. The event loop never waits
for the stream: a full queue drops lines, and the next line that fits says how many.
"""

import json
import logging
import queue
import threading
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self, cast

import orjson
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

LogLevel = Literal["debug", "info", "warning", "error"]
QUEUE_LINES = 10_000
CLOSE_TIMEOUT_S = 2.0
# What a pipe takes in one piece (PIPE_BUF of Linux): processes that share one don't cut each other's lines.
_WHOLE_BYTES = 4096


class LogWriter:
    """A bounded queue of lines and the thread that writes them.

    Attributes:
        num_dropped: Lines that found the queue full or the stream broken.
    """

    def __init__(self, stream: BinaryIO, *, queue_lines: int = QUEUE_LINES) -> None:
        self.num_dropped = 0
        self._num_dropped_told = 0
        self._num_unflushed = 0
        self._num_unflushed_bytes = 0
        self._is_closed = False
        self._stream = stream
        self._lines: queue.Queue[bytes | None] = queue.Queue(queue_lines)
        # A daemon: a reader that never takes the last lines must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue one line, without its newline; never waits. After `close`, writes it itself."""
        if self._is_closed:
            self._write(line)
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    # The names that structlog calls on the logger it wraps.
    debug = info = warning = error = write

    def close(self) -> None:
        """Write what is queued, for at most `CLOSE_TIMEOUT_S`."""
        try:
            self._lines.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_TIMEOUT_S)
        # Not where the thread still waits for the stream: the next to write would wait as well.
        self._is_closed = not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            untold = self.num_dropped - self._num_dropped_told
            if untold and self._write(orjson.dumps({"event": "log_lines_dropped", "num_lines": untold})):
                self._num_dropped_told += untold
        self._flush()

    def _write(self, line: bytes) -> bool:
        """Write a line; it is flushed with those that wait behind it, as many as go out as one piece."""
        if self._num_unflushed_bytes + len(line) >= _WHOLE_BYTES:
            self._flush()
        self._num_unflushed += 1
        self._num_unflushed_bytes += len(line) + 1
        try:
            self._stream.write(line + b"\n")
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._lose()
            return False
        return self._flush() if self._lines.empty() else True

    def _flush(self) -> bool:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._lose()
            return False
        self._num_unflushed = self._num_unflushed_bytes = 0
        return True

    def _lose(self) -> None:
        self.num_dropped += self._num_unflushed
        self._num_unflushed = self._num_unflushed_bytes = 0


def open_log(writer: LogWriter, level: LogLevel) -> FilteringBoundLogger:
    """Return a logger whose events of `level` and above become lines of `writer`."""
    log = structlog.wrap_logger(
        writer,
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            _name_level,
            structlog.processors.format_exc_info,
            _render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
    )
    return cast("FilteringBoundLogger", log.bind())


def _name_level(_: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add the level where it is not info, so that events carry no more than what they tell."""
    if method != "info":
        event["level"] = method
    return event


def _render(_: WrappedLogger, __: str, event: EventDict) -> bytes:
    """Render one line. What orjson refuses (lone surrogates, huge integers) goes through json."""
    values: dict[str, Any] = dict(event)
    try:
        return orjson.dumps(values, default=repr)
    except TypeError:
        return json.dumps(values, default=repr, ensure_ascii=False).encode("utf-8", errors="replace")
