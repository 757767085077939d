"""The events of one turn, kept for those who watch it. Knows events; does not know workers or calls.

Used on one event loop, without locks.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable

from pagecast.v1 import generation_pb2

# Where merging ends, so that no message outgrows the 4 MiB that clients take by default.
MAX_CHUNK_TOKENS = 1024
MAX_CHUNK_CHARACTERS = 32_768
# What a message costs in memory beside its bytes on the wire: 520 measured for a chunk of one token.
MESSAGE_BYTES = 512
# A token inside a chunk: 59 bytes measured, of which about 4 are on the wire.
TOKEN_BYTES = 64


class EventLog:
    """Collects events; each reader gets all of them from the start, at its own pace.

    Chunks that nobody has taken yet are merged, so a slow reader costs few messages and holds up
    neither the turn nor another reader.

    Attributes:
        keeps_all: Whether events stay once they are taken; if not, there is only one reader.
    """

    def __init__(self, *, keeps_all: bool) -> None:
        self.keeps_all = keeps_all
        self._events: list[generation_pb2.GenerateResponse] = []
        self._num_taken = 0  # of `_events`, by the reader that is furthest
        self._waiting: list[asyncio.Future[None]] = []
        self._is_closed = False
        self._error: Exception | None = None

    @property
    def num_events(self) -> int:
        """Events that are held."""
        return len(self._events)

    @property
    def num_bytes(self) -> int:
        """About what the events take in memory."""
        return sum(
            event.ByteSize() + MESSAGE_BYTES + TOKEN_BYTES * len(event.chunk.tokens) for event in self._events
        )

    def put(self, event: generation_pb2.GenerateResponse) -> None:
        """Add an event, which is the log's from then on. A closed log takes none."""
        if self._is_closed:
            return
        has_untaken = len(self._events) > self._num_taken
        if has_untaken and _can_merge(self._events[-1], event):
            _merge(self._events[-1].chunk, event.chunk)
        else:
            self._events.append(event)
        self._tell()

    def close(self, error: Exception | None = None) -> None:
        """Let readers end, or raise `error`, once they have all events. The first call counts."""
        if self._is_closed:
            return
        self._is_closed = True
        self._error = error
        self._tell()

    def compact(self) -> None:
        """Merge all chunks of a closed log that can be, for readers to come."""
        if not self._is_closed:
            raise ValueError("the log is still open")
        self._events = _compacted(self._events)

    async def read(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the events from the start to the end, waiting for them. Raises the error of `close`."""
        events = self._events  # a list that `compact` replaces is complete
        position = 0
        while True:
            while position < len(events):
                if self.keeps_all:
                    event = events[position]
                    position += 1
                    self._num_taken = max(self._num_taken, position)
                else:
                    event = events.pop(0)
                yield event
            if self._is_closed:
                break
            news = asyncio.get_running_loop().create_future()
            self._waiting.append(news)
            await news
        if self._error is not None:
            raise self._error

    def _tell(self) -> None:
        """Wake everyone who waits; who waits from now on waits for the next news."""
        for news in self._waiting:
            if not news.done():  # cancelled, where its reader was
                news.set_result(None)
        self._waiting.clear()


def _compacted(events: Iterable[generation_pb2.GenerateResponse]) -> list[generation_pb2.GenerateResponse]:
    merged: list[generation_pb2.GenerateResponse] = []
    for event in events:
        if merged and _can_merge(merged[-1], event):
            _merge(merged[-1].chunk, event.chunk)
        else:
            # A copy: readers of the list that is replaced may still have to send theirs.
            kept = generation_pb2.GenerateResponse()
            kept.CopyFrom(event)
            merged.append(kept)
    return merged


def _can_merge(event: generation_pb2.GenerateResponse, later: generation_pb2.GenerateResponse) -> bool:
    return (
        event.HasField("chunk")
        and later.HasField("chunk")
        and len(event.chunk.tokens) + len(later.chunk.tokens) <= MAX_CHUNK_TOKENS
        and len(event.chunk.text_delta) + len(later.chunk.text_delta) <= MAX_CHUNK_CHARACTERS
    )


def _merge(chunk: generation_pb2.TokenChunk, later: generation_pb2.TokenChunk) -> None:
    chunk.tokens.extend(later.tokens)
    chunk.text_delta += later.text_delta
    if later.HasField("usage"):
        chunk.usage.CopyFrom(later.usage)
