"""Which CPUs and how many threads each worker gets. Knows neither processes nor where settings come from."""

from dataclasses import dataclass

from pagecast._cpus import Cpus
from service.errors import StartError


@dataclass(frozen=True, slots=True)
class Placement:
    """Of one worker.

    Attributes:
        num_threads: For kernels.
        cpus: The only ones that the process may run on; memory that it touches first is near them. None: all.
    """

    num_threads: int
    cpus: tuple[int, ...] | None


def place_workers(
    cpus: Cpus,
    *,
    num_workers: int | None,
    threads: int | None,
    max_threads: int,
    numa: bool,
    pin_threads: bool,
) -> list[Placement]:
    """Share the CPUs out: workers that each took all of them would wait for one another.

    Args:
        cpus: What the gateway may use.
        num_workers: None: one for each node with `numa`, else one.
        threads: For each worker. None: as many as it gets CPUs, and all together no more than the quota.
        max_threads: The most that a worker takes.
        numa: Bind each worker to one NUMA node, an equal number to each.
        pin_threads: Whether workers pin their threads: then no CPU may belong to two of them.

    Raises:
        StartError: Nodes would get unequal numbers of workers, or there are too few CPUs to pin threads to.
    """
    nodes = cpus.nodes if numa else (cpus.allowed,)
    total = num_workers if num_workers is not None else len(nodes)
    if total % len(nodes):
        raise StartError(f"--workers {total}: --numa needs a multiple of the {len(nodes)} NUMA nodes")
    of_node = total // len(nodes)
    granted = max_threads if cpus.quota is None else max(1, cpus.num_threads // total)
    placements: list[Placement] = []
    for node in nodes:
        for place in range(of_node):
            # Only pinned threads need CPUs that are nobody else's; others are better off with a choice.
            own = node[_part(node, place, of_node)] if pin_threads else node
            num_threads = threads or min(max(1, len(node) // of_node), granted, max_threads)
            if pin_threads and num_threads > len(own):
                raise StartError(
                    f"--pin-threads needs a CPU for each thread: --workers {total} times --threads "
                    f"{num_threads}, this process has {len(cpus.allowed)}"
                    + (f" in {len(nodes)} NUMA nodes" if numa else "")
                )
            placements.append(Placement(num_threads, None if own == cpus.allowed else own))
    return placements


def _part(node: tuple[int, ...], place: int, num_places: int) -> slice:
    """The place's part of a node's CPUs, as even as can be."""
    return slice(len(node) * place // num_places, len(node) * (place + 1) // num_places)
