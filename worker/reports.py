"""Numbered step reports, the last ones kept so that a reader that lost its stream can come back."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice

from pagecast.worker.v1 import worker_pb2

# At a hundred steps a second 40 s of them.
_MIN_KEPT = 4096
# A model so small that it takes thousands of steps a second is soon that far ahead of a gateway that waits
# for a CPU; its reports are small.
_MAX_BYTES = 8 << 20
_NEWEST = 64
_MOST_AT_ONCE = 1024


class ReportRing:
    """Reports numbered from 1 without gaps. Used on one asyncio thread.

    Args:
        min_kept: Reports kept; a reader further behind may have lost some and is told so.
        max_bytes: Of reports; more than `min_kept` are kept while they take no more.
    """

    def __init__(self, min_kept: int = _MIN_KEPT, max_bytes: int = _MAX_BYTES) -> None:
        self._min_kept = min_kept
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: deque[worker_pb2.StreamStepsResponse] = deque()
        self._last = 0
        self._is_closed = False
        self._news = asyncio.Event()

    def append(self, report: worker_pb2.StreamStepsResponse) -> None:
        """Number one report, which is the ring's from then on, and wake the readers."""
        self._last += 1
        report.report = self._last
        self._kept.append(report)
        self._num_bytes += report.ByteSize()
        while len(self._kept) > self._min_kept and self._num_bytes > self._max_bytes:
            self._num_bytes -= self._kept.popleft().ByteSize()
        self._wake()

    def close(self) -> None:
        """Let readers finish: they get what there is, and their streams end."""
        self._is_closed = True
        self._wake()

    async def follow(self, after_report: int) -> AsyncIterator[worker_pb2.StreamStepsResponse]:
        """Yield every report numbered over `after_report`, then those to come, until `close`.

        0 starts at the oldest one kept: a new reader knows none of the turns before it, and can't miss
        one of its own.

        Raises LookupError if the next one is no longer kept, or was never made.
        """
        last = after_report
        while True:
            first_kept = self._last - len(self._kept) + 1
            if after_report == last == 0:
                last = first_kept - 1
            if last > self._last or last + 1 < first_kept:
                raise LookupError(f"report {last + 1} is not kept; kept: {first_kept} to {self._last}")
            news = self._news
            for report in self._next(last):
                yield report
                last = report.report
            if last == self._last:
                if self._is_closed:
                    return
                await news.wait()

    def _next(self, last: int) -> list[worker_pb2.StreamStepsResponse]:
        """Some of the reports after number `last`, in order; none where there is none."""
        num_missing = self._last - last
        if num_missing <= _NEWEST:  # of a reader that keeps up: from the end, where a deque is quick
            return [self._kept[place] for place in range(-num_missing, 0)]
        first = len(self._kept) - num_missing
        return list(islice(self._kept, first, first + _MOST_AT_ONCE))

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
