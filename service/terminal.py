"""Standard output, and what a person at a terminal sees while waiting. Knows no client and no command."""

import contextlib
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

from rich.console import Console, RenderableType
from rich.status import Status


class OutputError(Exception):
    """Standard output cannot be written to; the text says why."""


class Output:
    """Standard output, every write of which arrives at once or raises.

    Args:
        stream: None: closed before the process began.
        encoding: What to write in; None: the stream's own, with "?" for what that cannot spell.

    Raises:
        OutputError: There is no stream.
    """

    def __init__(self, stream: IO[str] | None, encoding: str | None = None) -> None:
        if stream is None:
            raise OutputError("it is closed")
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors="replace")
        self._stream = stream
        self._at_line_start = True

    def write(self, text: str) -> None:
        """Write text. Raises OutputError, after which the stream's rest goes nowhere."""
        with self._told():
            self._stream.write(text)
            self._stream.flush()
        self._at_line_start = text.endswith("\n") if text else self._at_line_start

    def print(self, renderable: RenderableType) -> None:
        """Write what rich can render, as lines. Raises as `write` does."""
        with self._told():
            Console(file=self._stream).print(renderable)
            self._stream.flush()

    def end_line(self) -> None:
        """Write a newline unless at the start of a line."""
        if not self._at_line_start:
            self.write("\n")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Makes OutputError of OSError, and leads the stream to nowhere.

        What it still holds would fail once more when the process ends, and be told in Python's words.
        """
        try:
            yield
        except OSError as error:
            self._at_line_start = True
            with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
                descriptor = self._stream.fileno()
                with Path(os.devnull).open("wb") as nowhere:
                    os.dup2(nowhere.fileno(), descriptor)
            raise OutputError(error.strerror or str(error)) from error


class Waiting:
    """A spinner that appears when nothing has come for `delay_s` seconds; rich shows it only on a terminal.

    It is for the time before the first output only: it redraws its line, and would wipe text on it.
    """

    def __init__(self, console: Console, message: str, delay_s: float = 1.0) -> None:
        self._status = Status(message, console=console)
        self._lock = threading.Lock()  # the timer's thread starts what the caller's stops
        self._stopped = False
        self._timer = threading.Timer(delay_s, self._show)
        self._timer.daemon = True

    def stop(self) -> None:
        """Take it away for good; later calls do nothing."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._timer.cancel()
                self._status.stop()

    def _show(self) -> None:
        with self._lock:
            if not self._stopped:
                self._status.start()

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
