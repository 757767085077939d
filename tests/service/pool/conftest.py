import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from service.config import ServeSettings
from service.pool import Incarnation, local
from service.pool.local import LocalPool
from tests.service.conftest import until

# Reads its lifeline as a worker does: the token first, then its end.
SCRIPT = """
import os, signal, sys
fd = int(sys.argv[sys.argv.index("--parent-fd") + 1])
address = sys.argv[sys.argv.index("--listen") + 1]
out = os.fdopen(fd, "rb", 0)
with open(sys.argv[1] + "/told-" + os.path.basename(address), "wb") as told:
    told.write(out.readline())
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
out.read(1)
os._exit(7)
"""


class NoLog:
    """Stands for a logger: keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def bind(self, **_: Any) -> "NoLog":
        return self

    def info(self, event: str, **fields: Any) -> None:
        self.told.append((event, fields))

    debug = warning = error = info

    def events(self, name: str) -> list[dict[str, Any]]:
        """The fields of the events of that name."""
        return [fields for event, fields in self.told if event == name]


def is_running(pid: int | None) -> bool:
    """Whether a process is there and more than a zombie."""
    try:
        # The last field before the numbers: Z is a process that ended and is not yet reaped.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Watched:
    """A pool whose `watch` runs, and what it logs."""

    def __init__(self, pool: LocalPool, log: NoLog) -> None:
        self.pool = pool
        self.log = log
        self.watching = asyncio.create_task(pool.watch())


@pytest.fixture
async def start_pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def start(*command: str, workers: int = 1, settings: ServeSettings | None = None) -> Watched:
        words = list(command) or [sys.executable, "-c", SCRIPT, str(tmp_path)]
        monkeypatch.setattr(local, "worker_command", lambda settings: words)
        log = NoLog()
        chosen = settings or ServeSettings(workers=workers)
        made.append(Watched(LocalPool.start(chosen, log), log))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for watched in made:
        watched.watching.cancel()
        await asyncio.gather(watched.watching, return_exceptions=True)
        watched.pool.stop(0.0)


async def told(folder: Path, incarnation: Incarnation) -> str:
    path = folder / f"told-{Path(incarnation.address).name}"
    await until(lambda: path.exists() and path.read_text().endswith("\n"))
    return path.read_text().strip()


def script(tmp_path: Path, *extra: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT, str(tmp_path), *extra]


def holds(path: Path, text: str) -> bool:
    return text.encode() in path.read_bytes()


def socket_of(incarnation: Incarnation) -> Path:
    return Path(incarnation.address.removeprefix("unix:"))


def folder_of(incarnation: Incarnation) -> Path:
    return socket_of(incarnation).parent
