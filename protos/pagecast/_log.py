"""JSON lines on a byte stream, written by a thread of their own.

Knows how an event becomes one line; does not know what events mean. The event loop never waits
for the stream: a full queue drops lines, and the next line that fits says how many.
"""

import json
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, BinaryIO, Literal, Protocol, Self, cast

import orjson
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

LogLevel = Literal["debug", "info", "warning", "error"]
QUEUE_LINES = 10_000
CLOSE_TIMEOUT_S = 2.0
# What a pipe takes in one piece (PIPE_BUF of Linux): processes that share one don't cut each other's lines.
_WHOLE_BYTES = 4096


class Log(FilteringBoundLogger, Protocol):
    """A logger that also takes events that come together."""

    def info_all(self, event: str, each: Sequence[Mapping[str, Any]]) -> None:
        """Write an event of level info for each of these values, all of one time, as one piece of work.

        Ask `is_enabled_for` first where making the values costs.
        """
        ...


class _Lines(queue.Queue[tuple[bytes, ...] | None]):
    """A queue of groups of lines. Its size counts lines; a group goes in where there is room for one."""

    def _init(self, maxsize: int) -> None:
        super()._init(maxsize)
        self._num_lines = 0

    def _qsize(self) -> int:
        return self._num_lines

    def _put(self, item: tuple[bytes, ...] | None) -> None:
        super()._put(item)
        self._num_lines += 1 if item is None else len(item)

    def _get(self) -> tuple[bytes, ...] | None:
        item: tuple[bytes, ...] | None = super()._get()
        self._num_lines -= 1 if item is None else len(item)
        return item


class LogWriter:
    """A bounded queue of lines and the thread that writes them.

    Attributes:
        num_dropped: Lines that found the queue full or the stream broken.
    """

    def __init__(self, stream: BinaryIO, *, queue_lines: int = QUEUE_LINES) -> None:
        self.num_dropped = 0
        self._num_dropped_told = 0
        self._waiting: list[bytes] = []  # for what goes out as one piece
        self._num_waiting_bytes = 0
        self._is_closed = False
        self._stream = stream
        self._lines = _Lines(queue_lines)
        # A daemon: a reader that never takes the last lines must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, *lines: bytes) -> None:
        """Queue lines, without their newlines; never waits. After `close`, writes them itself."""
        if self._is_closed:
            self._write(lines)
            return
        try:
            self._lines.put_nowait(lines)
        except queue.Full:
            self.num_dropped += len(lines)

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
        while (lines := self._lines.get()) is not None:
            self._write(lines)
            untold = self.num_dropped - self._num_dropped_told
            if not untold:
                continue
            self._write((orjson.dumps({"event": "log_lines_dropped", "num_lines": untold}),))
            if self._flush():  # told once it is out, not where it waits for a piece that fails
                self._num_dropped_told += untold
        self._flush()

    def _write(self, lines: tuple[bytes, ...]) -> None:
        """Write lines together with those that wait behind them, as many as go out as one piece."""
        for line in lines:
            if self._num_waiting_bytes + len(line) >= _WHOLE_BYTES:
                self._flush()
            self._waiting.append(line)
            self._num_waiting_bytes += len(line) + 1
        if self._lines.empty():
            self._flush()

    def _flush(self) -> bool:
        """Write the lines that wait, in one piece: the stream may be one without a buffer."""
        lines, self._waiting, self._num_waiting_bytes = self._waiting, [], 0
        if not lines:
            return True
        try:
            self._stream.write(b"\n".join((*lines, b"")))
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self.num_dropped += len(lines)
            return False
        return True


def open_log(writer: LogWriter, level: LogLevel) -> Log:
    """Return a logger whose events of `level` and above become lines of `writer`."""
    filtering: Any = structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()])
    log = structlog.wrap_logger(
        writer,
        processors=[_stamp, _name_level, structlog.processors.format_exc_info, _render],
        wrapper_class=type("_Log", (_Together, filtering), {}),
    )
    return cast("Log", log.bind())


class _Together(structlog.BoundLoggerBase):
    """`info_all` for a logger of structlog; it passes by its processors."""

    def info_all(self, event: str, each: Sequence[Mapping[str, Any]]) -> None:
        if each and self.is_enabled_for(logging.INFO):  # type: ignore[attr-defined]
            last = {"event": event, "ts": _now()}
            self._logger.info(*[_rendered({**self._context, **values, **last}) for values in each])


def _now() -> str:
    """The time of an event."""
    return datetime.now(tz=UTC).isoformat().replace("+00:00", "Z")


def _stamp(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    event["ts"] = _now()
    return event


def _name_level(_: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add the level where it is not info, so that events carry no more than what they tell."""
    if method != "info":
        event["level"] = method
    return event


def _render(_: WrappedLogger, __: str, event: EventDict) -> bytes:
    return _rendered(dict(event))


def _rendered(values: dict[str, Any]) -> bytes:
    """Render one line. What orjson refuses (lone surrogates, huge integers) goes through json."""
    try:
        return orjson.dumps(values, default=repr)
    except TypeError:
        return json.dumps(values, default=repr, ensure_ascii=False).encode("utf-8", errors="replace")
