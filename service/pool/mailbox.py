"""Events of one generation on their way from the step reader to its turn.

Knows events; does not know links, clients or sessions. Used on one event loop, without locks.
"""

import asyncio
from collections import deque

from pagecast.worker.v1 import worker_pb2


class Mailbox:
    """Holds what one turn has not taken yet, so that no turn ever holds up the step reader."""

    def __init__(self) -> None:
        self._events: deque[worker_pb2.GenerationEvent] = deque()
        self._news = asyncio.Event()
        self._error: Exception | None = None

    def put(self, event: worker_pb2.GenerationEvent) -> None:
        """Add an event behind those that wait."""
        self._events.append(event)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Let `take` raise `error` once the events that wait are taken; the first error stays."""
        if self._error is None:
            self._error = error
        self._news.set()

    async def take(self) -> worker_pb2.GenerationEvent:
        """Return the next event, waiting for it. Raises the error of `fail`."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()
