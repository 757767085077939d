"""The CPUs that a process may use: its affinity mask, its cgroups' quota, the machine's NUMA nodes.

Shared by gateway and worker. Functions over the files below a root folder; knows no settings.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_CGROUPS = Path("sys/fs/cgroup")
_NODES = Path("sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Cpus:
    """What a process may use.

    Attributes:
        allowed: CPUs of its affinity mask, ascending; at least one.
        quota: CPU time per time that its cgroups grant. None: no limit.
        nodes: `allowed` by NUMA node, nodes without any left out; one where the machine tells of none.
    """

    allowed: tuple[int, ...]
    quota: float | None
    nodes: tuple[tuple[int, ...], ...]

    @property
    def num_threads(self) -> int:
        """Threads that can be at work at once; where a quota grants part of a CPU, that one too."""
        if self.quota is None:
            return len(self.allowed)
        return max(1, min(len(self.allowed), math.ceil(self.quota)))


def read_cpus(root: Path, allowed: Collection[int]) -> Cpus:
    """Read what a process with the affinity mask `allowed` may use; `root` is `/`, or a copy of it.

    Raises:
        ValueError: `allowed` is empty.
    """
    if not allowed:
        raise ValueError("allowed: no CPU")
    return Cpus(tuple(sorted(allowed)), cpu_quota(root), numa_nodes(root, allowed))


def cpu_quota(root: Path) -> float | None:
    """Return the least CPU time per time of the process's cgroup and those above it; None without a limit.

    Reads `cpu.max` of version 2 and `cpu.cfs_quota_us` of version 1, wherever the process's controllers are.
    What can't be read or is no number limits nothing.
    """
    quotas = [quota for folder in _cgroup_folders(root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def numa_nodes(root: Path, allowed: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """Return `allowed` by NUMA node, in the order of nodes; those of no node are a node of their own."""
    nodes: list[tuple[int, ...]] = []
    left = set(allowed)
    folders = (path for path in (root / _NODES).glob("node*") if path.name[4:].isdecimal())
    for folder in sorted(folders, key=lambda path: int(path.name[4:])):
        try:
            cpus = left.intersection(parse_cpu_list((folder / "cpulist").read_text()))
        except (OSError, ValueError):
            continue
        left -= cpus
        if cpus:
            nodes.append(tuple(sorted(cpus)))
    if left:
        nodes.append(tuple(sorted(left)))
    return tuple(nodes)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a kernel's list, e.g. `0-2,8`.

    Raises:
        ValueError: It is no such list.
    """
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        cpus.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(cpus)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """The process's own cgroups with a CPU controller, and all above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            mounts = [_CGROUPS, _CGROUPS / "unified"]
        elif "cpu" in controllers.split(","):
            mounts = [_CGROUPS / controllers, _CGROUPS / "cpu"]
        else:
            continue
        # A path that leaves the process's namespace (`/../x`), or was made outside of a container, is not
        # below the mount: what is there of its ancestors counts.
        own = PurePosixPath(*(part for part in PurePosixPath(path).parts if part not in ("/", "..")))
        for mount in mounts:
            for folder in (own, *own.parents):
                yield root / mount / folder


def _quota_of(folder: Path) -> float | None:
    """CPU time per time of one cgroup, of either version."""
    try:
        maximum = folder / "cpu.max"
        if maximum.exists():
            quota, period = maximum.read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        if quota == "max" or int(quota) <= 0 or int(period) <= 0:
            return None
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None
