"""Events of one generation on their way from the step reader to its turn.

Knows events; does not know links, clients or sessions. Used on one event loop, without locks.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from pagecast.worker.v1 import worker_pb2


class Mailbox:
    """Holds what one turn has not taken yet, so that no turn ever holds up the step reader."""

    def __init__(self) -> None:
        self._events: deque[worker_pb2.GenerationEvent] = deque()
        self._error: Exception | None = None
        self._take: Callable[[worker_pb2.GenerationEvent], bool] | None = None
        self._end: asyncio.Future[worker_pb2.GenerationEvent | Exception] | None = None

    def put(self, event: worker_pb2.GenerationEvent) -> None:
        """Hand an event to who takes, or add it behind those that wait."""
        if self._take is None:
            self._events.append(event)
            return
        try:
            if not self._take(event):
                self._stop(event)
        except Exception as error:  # noqa: BLE001  for the turn, which waits for it; the reader goes on
            self._stop(error)

    def fail(self, error: Exception) -> None:
        """Let `hand_to` raise `error` once the events that wait are taken; the first error stays."""
        self._error = self._error or error
        self._stop(self._error)

    async def hand_to(self, take: Callable[[worker_pb2.GenerationEvent], bool]) -> worker_pb2.GenerationEvent:
        """Call `take` with every event, those that wait and those to come, until it takes one no more.

        It is called where the event is put: no task has to wake up for each token.

        Returns:
            The event for which `take` returned False.

        Raises:
            Exception: That of `fail`, or what `take` raised.
        """
        while self._events:
            if not take(event := self._events.popleft()):
                return event
        if self._error is not None:
            raise self._error
        self._end = asyncio.get_running_loop().create_future()
        self._take = take
        try:
            end = await self._end
        finally:
            self._take = None
        if isinstance(end, Exception):
            raise end
        return end

    def _stop(self, end: worker_pb2.GenerationEvent | Exception) -> None:
        """Let who takes end with this; does nothing where nobody does."""
        if self._take is not None and self._end is not None and not self._end.done():
            self._end.set_result(end)
        self._take = None
