"""Events of one generation on their way from the step reader to its stream.

Knows events; does not know links, clients or sessions. Used on one event loop, without locks.
"""

import asyncio
from collections import deque

from pagecast.v1 import generation_pb2
from pagecast.worker.v1 import worker_pb2

# Where merging ends, so that no message outgrows the 4 MiB that clients take by default.
MAX_CHUNK_TOKENS = 1024
MAX_CHUNK_CHARACTERS = 32_768


class Mailbox:
    """Holds what one stream has not taken yet, chunks that wait merged into few.

    So a slow client costs the generation's own tokens, and never holds up the step reader or
    another stream.
    """

    def __init__(self) -> None:
        self._events: deque[worker_pb2.GenerationEvent] = deque()
        self._news = asyncio.Event()
        self._error: Exception | None = None

    def put(self, event: worker_pb2.GenerationEvent) -> None:
        """Add an event behind those that wait."""
        last = self._events[-1] if self._events else None
        if last is not None and _can_merge(last, event):
            _append(last.chunk, event.chunk)
        else:
            # A copy: a report belongs to its reader, and this one may grow.
            kept = worker_pb2.GenerationEvent()
            kept.CopyFrom(event)
            self._events.append(kept)
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


def _can_merge(event: worker_pb2.GenerationEvent, later: worker_pb2.GenerationEvent) -> bool:
    return (
        event.HasField("chunk")
        and later.HasField("chunk")
        and len(event.chunk.tokens) + len(later.chunk.tokens) <= MAX_CHUNK_TOKENS
        and len(event.chunk.text_delta) + len(later.chunk.text_delta) <= MAX_CHUNK_CHARACTERS
    )


def _append(chunk: generation_pb2.TokenChunk, later: generation_pb2.TokenChunk) -> None:
    chunk.tokens.extend(later.tokens)
    chunk.text_delta += later.text_delta
    if later.HasField("usage"):
        chunk.usage.CopyFrom(later.usage)
