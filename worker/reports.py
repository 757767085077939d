"""Numbered step reports, the last ones kept so that a reader that lost its stream can come back."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from pagecast.worker.v1 import worker_pb2

_MAX_KEPT = 4096


class ReportRing:
    """Reports numbered from 1 without gaps. Used on one asyncio thread.

    Args:
        max_kept: Reports kept; a reader further behind has lost some and is told so.
    """

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._kept: deque[worker_pb2.StreamStepsResponse] = deque(maxlen=max_kept)
        self._last = 0
        self._is_closed = False
        self._news = asyncio.Event()

    def append(self, report: worker_pb2.StreamStepsResponse) -> None:
        """Number one report, which is the ring's from then on, and wake the readers."""
        self._last += 1
        report.report = self._last
        self._kept.append(report)
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
            # Not all that is kept: a reader that keeps up lacks but the newest.
            for report in [self._kept[place] for place in range(last - self._last, 0)]:
                yield report
                last = report.report
            if last == self._last:
                if self._is_closed:
                    return
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
