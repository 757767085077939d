"""Ctrl-C while a reply streams: it ends the reply, not the program. Knows the client, no terminal."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from types import FrameType

import pagecast

# How often is looked whether the server has announced the generation that is to be cancelled.
_POLL_S = 0.05
_CANCEL_TIMEOUT_S = 5.0


@contextlib.contextmanager
def cancel_on_interrupt(session: pagecast.ClientSession, generation: pagecast.Generation) -> Iterator[None]:
    """Within the block, which reads the generation, SIGINT cancels it; of the main thread only.

    The server cancels it and ends the stream, so that what has been read is what stays in the log. A
    second SIGINT, or a cancel that cannot be sent, ends the call on this side: reading on raises.
    """
    # What a signal's handler may do is little; a queue that it may put into wakes the thread that calls.
    presses: SimpleQueue[bool] = SimpleQueue()

    def press(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  what signal calls
        presses.put(True)

    canceller = threading.Thread(target=_cancel, args=(session, generation, presses), daemon=True)
    before = signal.signal(signal.SIGINT, press)
    canceller.start()
    try:
        yield
    finally:
        presses.put(False)
        signal.signal(signal.SIGINT, before)
        canceller.join()


def _cancel(
    session: pagecast.ClientSession, generation: pagecast.Generation, presses: "SimpleQueue[bool]"
) -> None:
    """Wait for a press, then cancel; False in the queue says that the generation has ended."""
    if not presses.get():
        return
    while generation.generation_id is None:
        with contextlib.suppress(Empty):
            if presses.get(timeout=_POLL_S):
                generation.cancel()
            return
    try:
        session.cancel(generation.generation_id, timeout_s=_CANCEL_TIMEOUT_S)
    except pagecast.GenerationNotFound:  # it has just ended by itself
        pass
    except pagecast.PagecastError:
        generation.cancel()
    if presses.get():
        generation.cancel()
