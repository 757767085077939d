"""The log of a whole process: whatever Python code would put on standard error becomes an event.

Knows Python's ways to standard error; does not know what events mean. What code outside Python writes
there is not caught: libraries are told to be silent before they are loaded.
"""

import io
import logging
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager

from structlog.typing import FilteringBoundLogger

from pagecast._log import Log, LogLevel, LogWriter, open_log


@contextmanager
def process_log(level: LogLevel) -> Iterator[Log]:
    """Make standard error a log for the rest of the process; enter once, before libraries are imported.

    `logging` (asyncio's and gRPC's loggers with it), `warnings` and text that is written to `sys.stderr`
    become `python_log`, what nobody caught in any thread `uncaught_exception`. None of it is undone on
    leaving, which writes what is queued: what comes later is written at once.
    """
    with LogWriter(sys.stderr.buffer) as writer:
        log = open_log(writer, level)
        logging.basicConfig(handlers=[_LogHandler(log)], level=level.upper(), force=True)
        logging.captureWarnings(True)
        _hook_exceptions(log)
        # Libraries bring handlers of their own, which keep the sys.stderr that they find.
        sys.stderr = _LogText(log)
        yield log


class _LogHandler(logging.Handler):
    """One record, one event."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001  arguments that do not fit the text are its caller's mistake
            message = f"{record.msg} {record.args!r}"
        details = {"exc_info": record.exc_info} if record.exc_info else {}
        write = getattr(self._log, _level_name(record.levelno))
        write("python_log", logger=record.name, message=message, **details)


class _LogText(io.TextIOBase):
    """Stands for `sys.stderr`: what is written up to the end of a line, or to a flush, becomes one event."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._text = ""
        # Any thread writes here; reentrant, since a finaliser may in the middle of it.
        self._lock = threading.RLock()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            self._text += text
            if self._text.endswith("\n"):
                self.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            message, self._text = self._text.rstrip(), ""
        if message:
            self._log.warning("python_log", logger="stderr", message=message)


def _hook_exceptions(log: FilteringBoundLogger) -> None:
    def on_exception(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        log.error("uncaught_exception", thread="MainThread", exc_info=(kind, error, trace))

    def on_thread_exception(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or isinstance(args.exc_value, SystemExit):
            return
        name = args.thread.name if args.thread is not None else None
        log.error("uncaught_exception", thread=name, exc_info=args.exc_value)

    def on_unraisable(args: "sys.UnraisableHookArgs") -> None:
        where = f"{args.err_msg or 'ignored in'}: {args.object!r}"
        log.error("uncaught_exception", message=where, exc_info=args.exc_value)

    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception
    sys.unraisablehook = on_unraisable


def _level_name(number: int) -> LogLevel:
    """The level at or below a number of `logging`, which allows any."""
    if number >= logging.ERROR:
        return "error"
    if number >= logging.WARNING:
        return "warning"
    return "info" if number >= logging.INFO else "debug"
