"""A worker's place in the pool: connects to whatever process is in it, again and again.

Knows when a worker is lost and what follows; does not know sessions or who uses the link.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

from structlog.typing import FilteringBoundLogger

from service.config import ServeSettings
from service.errors import StartError
from service.pool import Incarnation, Pool
from service.pool.channel import WrongVersion
from service.pool.link import WorkerLink

# Exit codes of a worker that starting it again does not change, and what each of them means.
PERMANENT_EXITS: Mapping[int, str] = {
    2: "its flags are wrong",
    3: "it cannot use the model file",
    5: "its kernels do not serve this model on this machine",
    6: "it lacks packages",
    7: "its KV pool does not fit in memory",
}
MAX_START_ATTEMPTS = 5
# Before a worker that somebody else runs is asked again which version it is.
VERSION_RETRY_S = 5.0


class Slot:
    """Holds the link to the present process of one place.

    Args:
        index: The place in `pool`.
        pool: Where processes come from.
        settings: Timeouts.
        log: Gets the events.

    Attributes:
        index: The place in the pool.
        link: The present one, lost or not. None before `start`.
    """

    def __init__(self, index: int, pool: Pool, settings: ServeSettings, log: FilteringBoundLogger) -> None:
        self.index = index
        self.link: WorkerLink | None = None
        self._pool = pool
        self._settings = settings
        self._log = log
        self._incarnation = Incarnation("")
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> WorkerLink:
        """Wait for the first process that serves.

        Raises:
            StartError: `MAX_START_ATTEMPTS` of them ended first, or one in a way that trying again does
                not change; the time is over; it is of another version.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._settings.start_timeout_s
        for attempt in range(1, MAX_START_ATTEMPTS + 1):
            incarnation = await self._pool.next(self.index)
            try:
                self.link = await self._connect(incarnation, max(0.0, deadline_s - loop.time()))
                break
            except StartError as error:
                code = incarnation.exit_code
                if code is not None and code in PERMANENT_EXITS:
                    raise StartError(f"{error}: {PERMANENT_EXITS[code]}") from error
                if code is None or attempt == MAX_START_ATTEMPTS:
                    raise
        assert self.link is not None  # noqa: S101  the last attempt raises
        return self.link

    async def keep(self, on_change: Callable[[WorkerLink, "WorkerLink | None"], None]) -> None:
        """Connect to the next process whenever the present one is lost; never ends by itself.

        Args:
            on_change: Told (lost, None) when a link is lost and (lost, next) when another is there.
        """
        link = self.link
        while link is not None:
            await link.lost.wait()
            self._tell_lost(link)
            on_change(link, None)
            # It may be there, stopped or without a connection: nobody would ever look after it.
            self._pool.kill(self.index, self._incarnation)
            self._close(link)
            self.link = await self._reconnect()
            on_change(link, self.link)
            link = self.link

    async def close(self) -> None:
        """Close the present link and wait for those that close; end `keep` before."""
        if self.link is not None:
            self._close(self.link)
        if self._closing:
            await asyncio.wait(self._closing)

    async def _connect(self, incarnation: Incarnation, timeout_s: float) -> WorkerLink:
        if incarnation.error:
            raise StartError(f"cannot start a worker: {incarnation.error}")
        link = await WorkerLink.connect(
            incarnation.address,
            version=version("pagecast"),
            exit_code=lambda: incarnation.exit_code,
            timeout_s=timeout_s,
            log=self._log,
            token=self._pool.token,
            worker_timeout_s=self._settings.worker_timeout_s,
            step_timeout_s=self._settings.step_timeout_s,
        )
        self._incarnation = incarnation
        self._log.info(
            "worker_connected", index=self.index, pid=incarnation.pid, worker=link.instance_id,
            model=link.model.name,
        )  # fmt: skip
        return link

    async def _reconnect(self) -> WorkerLink:
        """Try one process after the other, for as long as it takes."""
        is_version_told = False
        while True:
            incarnation = await self._pool.next(self.index)
            try:
                return await self._connect(incarnation, self._settings.start_timeout_s)
            except WrongVersion as error:
                if not is_version_told:
                    self._log.error("worker_refused", index=self.index, error=str(error))
                is_version_told = True
                self._pool.kill(self.index, incarnation)
                await asyncio.sleep(VERSION_RETRY_S)
            except StartError as error:
                self._log.error("worker_not_ready", index=self.index, pid=incarnation.pid, error=str(error))
                self._pool.kill(self.index, incarnation)

    def _tell_lost(self, link: WorkerLink) -> None:
        self._log.error(
            "worker_lost",
            index=self.index,
            pid=self._incarnation.pid,
            worker=link.instance_id,
            exit_code=self._incarnation.exit_code,
        )

    def _close(self, link: WorkerLink) -> None:
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def start_all(slots: Sequence[Slot]) -> list[WorkerLink]:
    """Wait until every slot has a link; the first that gets none ends the wait. Raises StartError."""
    tasks = [asyncio.create_task(slot.start()) for slot in slots]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(Exception):  # the first error is told
            await asyncio.gather(*tasks, return_exceptions=True)
