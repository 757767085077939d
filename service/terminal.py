"""What a person at a terminal sees while waiting. Knows no client and no command."""

import threading
from typing import Self

from rich.console import Console
from rich.status import Status


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
