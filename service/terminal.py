"""Standard output, and what a person at a terminal sees while waiting. Knows no client and no command."""

import contextlib
import io
import os
import threading
import time
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Literal, Self

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text


class OutputError(Exception):
    """Standard output cannot be written to; the text says why."""


class LineDiscarded(Exception):
    """Ctrl-C took back a line that was being typed."""


def read_line(prompt: str) -> str:
    """A line that a person types at a terminal, with editing and the history of this process.

    Raises:
        EOFError: Ctrl-D on an empty line, or the terminal is gone.
        KeyboardInterrupt: Ctrl-C on an empty line.
        LineDiscarded: Ctrl-C on any other.
        UnicodeError: The line is not text.
    """
    # Importing it readies the terminal, which only who reads from one may do.
    import readline  # noqa: PLC0415

    try:
        line = input(prompt)
    except KeyboardInterrupt:
        if readline.get_line_buffer():
            raise LineDiscarded from None
        raise
    line.encode()  # where the locale lets bytes pass as surrogates
    return line


def visible(text: str) -> str:
    """Text on one line, with escapes for what a terminal would not show but act on, or show as nothing."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def tell(console: Console, text: str) -> None:
    """A dim line beside what was asked for."""
    console.print(visible(text), style="dim", markup=False, highlight=False, soft_wrap=True)


class Output:
    """Standard output, every write of which arrives at once or raises.

    A terminal gets U+FFFD for control characters other than newline and tab: what models and other
    callers write is not to move its cursor. Anything else gets the text as it is.

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
        self.is_terminal = stream.isatty()
        self._at_line_start = True

    def write(self, text: str) -> None:
        """Write text. Raises OutputError, after which the stream's rest goes nowhere."""
        with self._told():
            self._stream.write(_without_controls(text) if self.is_terminal else text)
            self._stream.flush()
        self._at_line_start = text.endswith("\n") if text else self._at_line_start

    def table(
        self, headings: Sequence[str], rows: Collection[Sequence[str]], numbers: Collection[str]
    ) -> None:
        """Write rows of cells under headings: with lines on a terminal, in plain columns elsewhere.

        Args:
            headings: One per column.
            rows: As many cells each, of any text.
            numbers: The headings whose columns are aligned to the right.

        Raises:
            OutputError: As `write` does.
        """
        shown = [[visible(cell) for cell in row] for row in rows]
        if not self.is_terminal:
            self.write(_columns(headings, shown, numbers))
            return
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for at, heading in enumerate(headings):
            # The first one names what the row is about, and is there to be copied; numbers are short.
            side: Literal["left", "right"] = "right" if heading in numbers else "left"
            table.add_column(heading, justify=side, overflow="fold", no_wrap=at == 0 or heading in numbers)
        for row in shown:
            table.add_row(*map(Text, row))  # a str would be read as markup
        with self._told():
            Console(file=self._stream).print(table)
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


def _without_controls(text: str) -> str:
    return "".join(
        "\ufffd" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char for char in text
    )


def _columns(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str]) -> str:
    """Lines of cells, padded to their column's width and two spaces apart."""
    lines = [headings, *rows]
    widths = [max(cell_len(line[at]) for line in lines) for at in range(len(headings))]
    padded = [
        [
            " " * (width - cell_len(cell)) + cell
            if heading in numbers
            else cell + " " * (width - cell_len(cell))
            for cell, width, heading in zip(line, widths, headings, strict=True)
        ]
        for line in lines
    ]
    return "".join("  ".join(line).rstrip() + "\n" for line in padded)


class Waiting:
    """A spinner that appears when nothing has come for `delay_s` seconds; rich shows it only on a terminal.

    It tells the seconds since it was made.

    It is for the time before the first output only: it redraws its line, and would wipe text on it.
    """

    def __init__(self, console: Console, message: str, delay_s: float = 1.0) -> None:
        self._status = Status(_Elapsed(message), console=console)
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


class _Elapsed:
    """A message and the seconds since it was made, counted anew whenever it is drawn."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._since_s = time.monotonic()

    def __rich__(self) -> Text:
        return Text(f"{self._message}, {time.monotonic() - self._since_s:.0f} s")
