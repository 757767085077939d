"""A slot and the workers that come and go in its place."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from service.config import ServeSettings
from service.errors import StartError
from service.pool import Incarnation
from service.pool import slot as slot_module
from service.pool.link import WorkerLink
from service.pool.slot import MAX_START_ATTEMPTS, Slot, start_all
from tests.service.conftest import until
from tests.service.fake_worker import FakeWorker
from tests.service.pool.conftest import NoLog


class ScriptedPool:
    """Hands out what a test puts in, and remembers whom it was to kill."""

    token = "secret"
    size = 1

    def __init__(self) -> None:
        self.news: asyncio.Queue[Incarnation] = asyncio.Queue()
        self.killed: list[Incarnation] = []

    async def next(self, index: int) -> Incarnation:
        return await self.news.get()

    def kill(self, index: int, incarnation: Incarnation) -> None:
        self.killed.append(incarnation)

    async def watch(self) -> None:
        await asyncio.Event().wait()

    def stop(self, grace_s: float) -> None:
        """Has nothing to stop."""


class World:
    """A pool, one slot of it, and the workers that a test starts."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.pool = ScriptedPool()
        self.log = NoLog()
        self.slot = Slot(0, self.pool, ServeSettings(**settings), self.log)  # type: ignore[arg-type]
        self.changes: list[tuple[WorkerLink, WorkerLink | None]] = []
        self.workers: list[FakeWorker] = []
        self.keeping: asyncio.Task[None] | None = None

    async def add(self, **attributes: Any) -> tuple[FakeWorker, Incarnation]:
        worker = FakeWorker(self.folder, **attributes)
        self.workers.append(worker)
        await worker.start()
        incarnation = Incarnation(worker.address, pid=len(self.workers))
        self.pool.news.put_nowait(incarnation)
        return worker, incarnation

    def keep(self) -> None:
        self.keeping = asyncio.create_task(self.slot.keep(lambda lost, now: self.changes.append((lost, now))))

    async def end(self) -> None:
        if self.keeping is not None:
            self.keeping.cancel()
            await asyncio.gather(self.keeping, return_exceptions=True)
        await self.slot.close()
        for worker in self.workers:
            await worker.die()


MakeWorld = Callable[..., World]


@pytest.fixture
async def make_world(tmp_path: Path) -> AsyncIterator[MakeWorld]:
    worlds: list[World] = []

    def make(**settings: Any) -> World:
        worlds.append(World(tmp_path, **settings))
        return worlds[-1]

    yield make
    for world in worlds:
        await world.end()


async def failed_start(slot: Slot) -> str:
    with pytest.raises(StartError) as caught:
        await asyncio.wait_for(slot.start(), 5.0)
    return str(caught.value)


@pytest.mark.parametrize("code", sorted(slot_module.PERMANENT_EXITS))
async def test_an_exit_that_nothing_changes_ends_the_start_at_once(make_world: MakeWorld, code: int) -> None:
    world = make_world()
    world.pool.news.put_nowait(Incarnation("unix:/nowhere", exit_code=code))
    told = await failed_start(world.slot)
    assert f"exit code {code} before it served" in told
    assert told.endswith(slot_module.PERMANENT_EXITS[code])


async def test_other_exits_end_the_start_after_some(make_world: MakeWorld) -> None:
    world = make_world()
    for _ in range(MAX_START_ATTEMPTS + 1):
        world.pool.news.put_nowait(Incarnation("unix:/nowhere", exit_code=-9))
    assert "exit code -9" in await failed_start(world.slot)
    assert world.pool.news.qsize() == 1


async def test_a_start_goes_on_after_an_exit(make_world: MakeWorld) -> None:
    world = make_world()
    for _ in range(MAX_START_ATTEMPTS - 1):
        world.pool.news.put_nowait(Incarnation("unix:/nowhere", exit_code=1))
    worker, _ = await world.add()
    link = await world.slot.start()
    assert link.instance_id == worker.info.instance_id
    (connected,) = world.log.events("worker_connected")
    assert (connected["index"], connected["pid"], connected["model"]) == (0, 1, "tiny")


async def test_what_cannot_be_started_and_what_never_serves_end_the_start(make_world: MakeWorld) -> None:
    world = make_world(start_timeout_s=0.3)
    world.pool.news.put_nowait(Incarnation("", error="no memory"))
    assert await failed_start(world.slot) == "cannot start a worker: no memory"
    world.pool.news.put_nowait(Incarnation(f"unix:{world.folder}/none.sock"))
    assert "did not serve within 0.3 s" in await failed_start(world.slot)


async def test_one_slot_that_cannot_start_ends_the_wait_for_all(make_world: MakeWorld) -> None:
    waiting, failing = make_world(), make_world()
    failing.pool.news.put_nowait(Incarnation("unix:/nowhere", exit_code=3))
    with pytest.raises(StartError, match="exit code 3"):
        await asyncio.wait_for(start_all([waiting.slot, failing.slot]), 5.0)


async def test_a_lost_worker_is_followed_by_the_next(make_world: MakeWorld) -> None:
    world = make_world()
    first, incarnation = await world.add()
    link = await world.slot.start()
    world.keep()
    incarnation.exit_code = -9
    await first.die()
    await until(lambda: world.changes == [(link, None)])
    (lost,) = world.log.events("worker_lost")
    assert (lost["index"], lost["pid"], lost["exit_code"]) == (0, 1, -9)
    # Exits and starts that fail are no end once the gateway serves.
    for _ in range(MAX_START_ATTEMPTS + 1):
        world.pool.news.put_nowait(Incarnation("unix:/nowhere", exit_code=3))
    world.pool.news.put_nowait(Incarnation("", error="no memory"))
    second, _ = await world.add()
    await until(lambda: len(world.changes) == 2)
    assert world.changes[1][0] is link
    assert world.changes[1][1] is world.slot.link
    assert world.slot.link is not None
    assert world.slot.link.instance_id == second.info.instance_id
    assert len(world.log.events("worker_not_ready")) == MAX_START_ATTEMPTS + 2


async def test_a_lost_worker_whose_process_is_there_is_killed(make_world: MakeWorld) -> None:
    world = make_world()
    worker, incarnation = await world.add()
    await world.slot.start()
    world.keep()
    await until(lambda: worker.num_readers == 1)
    worker.info.instance_id = "another"
    await worker.cut_streams()
    await until(lambda: world.pool.killed == [incarnation])


async def test_a_worker_of_another_version_is_not_used_and_told_once(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_module, "VERSION_RETRY_S", 0.01)
    world = make_world()
    first, incarnation = await world.add()
    link = await world.slot.start()
    world.keep()
    incarnation.exit_code = 0
    await first.die()
    others = [(await world.add(version="9.9.9"))[1] for _ in range(3)]
    await world.add()
    await until(lambda: len(world.changes) == 2)
    assert world.changes[0] == (link, None)
    assert len(world.log.events("worker_refused")) == 1
    assert world.pool.killed == [incarnation, *others]


async def test_a_version_that_differs_ends_the_start(make_world: MakeWorld) -> None:
    world = make_world()
    await world.add(version="9.9.9")
    assert "'9.9.9'" in await failed_start(world.slot)
