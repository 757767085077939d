"""Ctrl-C in a conversation: it ends what runs, not the program. Knows the client, no terminal."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Self, TypeVar

import pagecast

_T = TypeVar("_T")
# How often is looked whether the server has announced the generation that is to be cancelled.
_POLL_S = 0.05
_CANCEL_TIMEOUT_S = 5.0


class Interrupts:
    """Takes SIGINT over within its block, of the main thread only.

    A press raises KeyboardInterrupt within `raised`, once. Elsewhere it is noted, for `raised` that has
    still to come, or for `cancelling`.
    """

    def __init__(self) -> None:
        # What a signal's handler may do is little; a queue that it may put into wakes who waits there.
        self._presses: SimpleQueue[bool] = SimpleQueue()
        self._raises = False

    def forget(self) -> None:
        """Drop what has been noted."""
        with contextlib.suppress(Empty):
            while True:
                self._presses.get_nowait()

    def raised(self, do: Callable[[], _T]) -> _T:
        """Do what a press, also one that has been noted, leaves by KeyboardInterrupt."""
        try:
            # First of all: what has been noted by now was before, what comes later raises.
            self._raises = True
            if not self._presses.empty():
                self.forget()
                raise KeyboardInterrupt
            return do()
        finally:
            self._raises = False

    @contextlib.contextmanager
    def cancelling(self, session: pagecast.ClientSession, generation: pagecast.Generation) -> Iterator[None]:
        """Within the block, which reads the generation, a press cancels it, also one that was noted before.

        The server cancels it and ends the stream, so that what has been read is what stays in the log. A
        second press, or a cancel that cannot be sent, ends the call on this side: reading on raises.
        """
        canceller = threading.Thread(target=_cancel, args=(session, generation, self._presses), daemon=True)
        canceller.start()
        try:
            yield
        finally:
            self._presses.put(False)
            canceller.join()

    def _press(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt
        self._presses.put(True)

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGINT, self._before)


def _cancel(
    session: pagecast.ClientSession, generation: pagecast.Generation, presses: "SimpleQueue[bool]"
) -> None:
    """Wait for a press, then cancel; False in the queue says that the generation has ended."""
    if not presses.get():
        return
    while generation.generation_id is None:
        with contextlib.suppress(Empty):
            if not presses.get(timeout=_POLL_S):
                return
            generation.cancel()
            break
    else:
        try:
            session.cancel(generation.generation_id, timeout_s=_CANCEL_TIMEOUT_S)
        except pagecast.GenerationNotFound:  # it has just ended by itself
            pass
        except pagecast.PagecastError:
            generation.cancel()
    while presses.get():
        generation.cancel()
