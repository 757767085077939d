import asyncio

import pytest

from pagecast.worker.v1 import worker_pb2
from worker.reports import ReportRing


def _report(name: str) -> worker_pb2.StreamStepsResponse:
    return worker_pb2.StreamStepsResponse(events=[worker_pb2.GenerationEvent(generation_id=name)])


async def _read(ring: ReportRing, after: int, count: int) -> list[int]:
    found = []
    async for report in ring.follow(after):
        found.append(report.report)
        if len(found) == count:
            break
    return found


async def test_every_reader_gets_every_report_in_order() -> None:
    ring = ReportRing()
    readers = [asyncio.create_task(_read(ring, 0, 5)) for _ in range(3)]
    for number in range(5):
        ring.append(_report(str(number)))
        await asyncio.sleep(0)
    assert await asyncio.gather(*readers) == [[1, 2, 3, 4, 5]] * 3


async def test_a_reader_comes_back_where_it_was() -> None:
    ring = ReportRing(min_kept=4, max_bytes=0)
    for number in range(6):
        ring.append(_report(str(number)))
    assert await _read(ring, 2, 4) == [3, 4, 5, 6]


async def test_a_new_reader_starts_at_the_oldest_report_kept() -> None:
    ring = ReportRing(min_kept=4, max_bytes=0)
    for number in range(6):
        ring.append(_report(str(number)))
    assert await _read(ring, 0, 4) == [3, 4, 5, 6]


@pytest.mark.parametrize("after", [1, 7])
async def test_a_reader_that_missed_reports_is_told(after: int) -> None:
    ring = ReportRing(min_kept=4, max_bytes=0)
    for number in range(6):
        ring.append(_report(str(number)))
    with pytest.raises(LookupError, match="kept: 3 to 6"):
        await _read(ring, after, 1)


async def test_closing_ends_readers_after_the_last_report() -> None:
    ring = ReportRing()
    ring.append(_report("a"))
    reader = asyncio.create_task(_read(ring, 0, 99))
    await asyncio.sleep(0)
    ring.append(_report("b"))
    ring.close()
    assert await reader == [1, 2]


async def test_small_reports_are_kept_while_they_take_little() -> None:
    size = worker_pb2.StreamStepsResponse(report=1, events=_report("a").events).ByteSize()
    ring = ReportRing(min_kept=4, max_bytes=10 * size)
    for _ in range(30):
        ring.append(_report("a"))
    assert await _read(ring, 20, 10) == list(range(21, 31))
    with pytest.raises(LookupError, match="kept: 21 to 30"):
        await _read(ring, 19, 1)


async def test_a_reader_far_behind_gets_all_in_order() -> None:
    ring = ReportRing()
    for _ in range(9000):
        ring.append(_report("a"))
    assert await _read(ring, 1, 8999) == list(range(2, 9001))
