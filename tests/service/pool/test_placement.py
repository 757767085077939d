"""How workers share CPUs, NUMA nodes and a quota; and that their processes are where they should be."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagecast._cpus import Cpus
from service.config import ServeSettings, available_cpus
from service.errors import StartError
from service.pool import local
from service.pool.local import LocalPool
from service.pool.placement import Placement, place_workers
from tests.service.conftest import until
from tests.service.pool.conftest import NoLog, Watched, script

FLAT = Cpus(tuple(range(8)), None, (tuple(range(8)),))
TWO = Cpus(tuple(range(12)), None, ((0, 1, 2, 3), tuple(range(4, 12))))


def placed(cpus: Cpus, **given: Any) -> list[tuple[int, tuple[int, ...] | None]]:
    settings = {"num_workers": None, "threads": None, "max_threads": 256, "numa": False, "pin_threads": False}
    return [(each.num_threads, each.cpus) for each in place_workers(cpus, **(settings | given))]


@pytest.mark.parametrize(
    ("cpus", "given", "places"),
    [
        (FLAT, {}, [(8, None)]),
        (FLAT, {"max_threads": 6}, [(6, None)]),
        (FLAT, {"num_workers": 3}, [(2, None)] * 3),
        (FLAT, {"num_workers": 9}, [(1, None)] * 9),
        (FLAT, {"num_workers": 2, "threads": 7}, [(7, None)] * 2),
        (Cpus(FLAT.allowed, 3.2, FLAT.nodes), {}, [(4, None)]),
        (Cpus(FLAT.allowed, 3.2, FLAT.nodes), {"num_workers": 2}, [(2, None)] * 2),
        (Cpus(FLAT.allowed, 3.2, FLAT.nodes), {"num_workers": 5}, [(1, None)] * 5),
        # One node: as without the flag.
        (FLAT, {"numa": True}, [(8, None)]),
        (FLAT, {"numa": True, "num_workers": 2}, [(4, None)] * 2),
        (TWO, {}, [(12, None)]),
        (TWO, {"numa": True}, [(4, TWO.nodes[0]), (8, TWO.nodes[1])]),
        (TWO, {"numa": True, "num_workers": 4}, [(2, TWO.nodes[0])] * 2 + [(4, TWO.nodes[1])] * 2),
        (Cpus(TWO.allowed, 6.0, TWO.nodes), {"numa": True}, [(3, TWO.nodes[0]), (3, TWO.nodes[1])]),
        (TWO, {"numa": True, "threads": 2, "pin_threads": True}, [(2, TWO.nodes[0]), (2, TWO.nodes[1])]),
        # Pinned threads of two workers must not meet on one CPU.
        (FLAT, {"num_workers": 2, "pin_threads": True}, [(4, (0, 1, 2, 3)), (4, (4, 5, 6, 7))]),
        (FLAT, {"num_workers": 3, "pin_threads": True}, [(2, (0, 1)), (2, (2, 3, 4)), (2, (5, 6, 7))]),
        (
            TWO,
            {"numa": True, "num_workers": 4, "pin_threads": True},
            [(2, (0, 1)), (2, (2, 3)), (4, (4, 5, 6, 7)), (4, (8, 9, 10, 11))],
        ),
    ],
)
def test_places(cpus: Cpus, given: dict[str, Any], places: list[Placement]) -> None:
    assert placed(cpus, **given) == places


@pytest.mark.parametrize(
    ("cpus", "given", "error"),
    [
        (TWO, {"numa": True, "num_workers": 3}, "--workers 3: --numa needs a multiple of the 2 NUMA nodes"),
        (TWO, {"numa": True, "num_workers": 1}, "--workers 1: --numa"),
        (FLAT, {"threads": 9, "pin_threads": True}, "--workers 1 times --threads 9, .* 8"),
        (FLAT, {"num_workers": 9, "pin_threads": True}, "--workers 9 times --threads 1"),
        (TWO, {"numa": True, "threads": 5, "pin_threads": True}, "--threads 5, .* in 2 NUMA nodes"),
    ],
)
def test_what_cannot_be_placed_is_refused(cpus: Cpus, given: dict[str, Any], error: str) -> None:
    with pytest.raises(StartError, match=error):
        placed(cpus, **given)


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """This machine's first two CPUs, as if each were a node of its own."""
    mask = sorted(os.sched_getaffinity(0))
    if len(mask) < 2:
        pytest.skip("one CPU")
    cpus = Cpus(tuple(mask[:2]), None, ((mask[0],), (mask[1],)))
    monkeypatch.setattr(local, "available_cpus", lambda: cpus)
    return mask[0], mask[1]


async def test_a_workers_process_begins_on_its_node(
    two_nodes: tuple[int, int],
    start_pool: Callable[..., Watched],
    tmp_path: Path,
) -> None:
    """Before it allocates anything: what the interpreter itself sees is the mask of the node."""
    code = (
        "import os, sys; mask = os.sched_getaffinity(0);"
        f"open({str(tmp_path)!r} + '/on-' + '-'.join(map(str, mask)), 'w').write(' '.join(sys.argv))"
    )
    watched = start_pool(sys.executable, "-c", code, settings=ServeSettings(numa=True))
    assert watched.pool.size == 2
    await until(lambda: all((tmp_path / f"on-{cpu}").exists() for cpu in two_nodes))
    for cpu in two_nodes:
        arguments = tmp_path / f"on-{cpu}"
        await until(lambda arguments=arguments: "--threads 1 --listen" in arguments.read_text())
        assert "--memory-share 0.5 --threads" in arguments.read_text()


async def test_cpus_that_cannot_be_had_are_told(
    monkeypatch: pytest.MonkeyPatch, start_pool: Callable[..., Watched], tmp_path: Path
) -> None:
    gone = Cpus((4096, 4097), None, ((4096,), (4097,)))
    monkeypatch.setattr(local, "available_cpus", lambda: gone)
    watched = start_pool(*script(tmp_path), settings=ServeSettings(numa=True))
    incarnation = await watched.pool.next(1)
    assert "preexec_fn" in incarnation.error


def test_a_start_that_cannot_be_placed_leaves_nothing(two_nodes: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--workers 3"):
        LocalPool.start(ServeSettings(numa=True, workers=3), NoLog())  # type: ignore[arg-type]


def test_the_gateways_own_cpus() -> None:
    assert set(available_cpus().allowed) == os.sched_getaffinity(0)
