"""Workers that answer no more, or whose step never ends, as a link finds them."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pagecast.worker.v1 import worker_pb2
from service.errors import PagecastError
from service.pool import prober
from tests.service.fake_worker import FakeWorker
from tests.service.pool.conftest import NoLog
from tests.service.pool.test_link import connect


class SilentWorker(FakeWorker):
    """Answers GetWorkerInfo until it is told to be silent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.talks = asyncio.Event()
        self.talks.set()

    async def GetWorkerInfo(self, request: Any, context: Any) -> worker_pb2.GetWorkerInfoResponse:  # noqa: N802
        await self.talks.wait()
        return self.info


@pytest.fixture
async def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SilentWorker]:
    monkeypatch.setattr(prober, "PROBE_INTERVAL_S", 0.05)
    worker = SilentWorker(tmp_path)
    await worker.start()
    yield worker
    await worker.die()


async def test_g01_a_worker_that_answers_no_more_is_lost(silent: SilentWorker) -> None:
    link = await connect(silent, worker_timeout_s=0.6)
    with link.follow("gen") as mailbox:
        silent.talks.clear()
        started_s = time.monotonic()
        with pytest.raises(PagecastError, match="WORKER_LOST"):
            await asyncio.wait_for(mailbox.hand_to(lambda _: True), 5.0)
        assert 0.5 < time.monotonic() - started_s < 2.0
    assert link.is_hung
    await link.close()


async def test_g01_silence_is_at_most_one_interval_longer_than_it_may_be(
    silent: SilentWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    log = NoLog()
    link = await connect(silent, worker_timeout_s=1.0, log=log)
    await asyncio.sleep(0.1)
    silent.talks.clear()
    started_s = time.monotonic()
    await asyncio.wait_for(link.lost.wait(), 5.0)
    took_s = time.monotonic() - started_s
    assert 0.7 < took_s < 1.6
    (told,) = log.events("worker_hangs")
    said_s = float(told["error"].removeprefix("it did not answer for ").removesuffix(" s"))
    assert 1.0 <= said_s < took_s + 0.4
    await link.close()


async def test_a_pause_of_this_process_is_no_silence_of_the_worker(silent: SilentWorker) -> None:
    """The fake worker runs in this process too: while that stands still, neither asks nor answers."""
    link = await connect(silent, worker_timeout_s=0.4)
    for awake_s in (0.0, 0.03, 0.07):
        await asyncio.sleep(0.2 + awake_s)
        time.sleep(0.8)  # noqa: ASYNC251  stops the loop, as SIGSTOP would
    await asyncio.sleep(0.2)
    assert not link.lost.is_set()
    await link.close()


async def test_one_late_answer_is_no_lost_worker(silent: SilentWorker) -> None:
    link = await connect(silent, worker_timeout_s=0.6)
    for _ in range(3):
        silent.talks.clear()
        await asyncio.sleep(0.45)
        silent.talks.set()
        await asyncio.sleep(0.2)
    assert not link.lost.is_set()
    await link.close()


async def test_g01_a_worker_whose_step_never_ends_is_lost(silent: SilentWorker) -> None:
    link = await connect(silent, step_timeout_s=2.0)
    silent.info.running_step_ns = 1_900_000_000
    await asyncio.sleep(0.2)
    assert not link.lost.is_set()
    silent.info.running_step_ns = 2_100_000_000
    await asyncio.wait_for(link.lost.wait(), 2.0)
    assert link.is_hung
    await link.close()
