"""CPU time and memory of other processes, from /proc. Knows no process by name."""

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, its threads' and of children that it waited for.

    Raises:
        OSError: There is no such process.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / _TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM, shared libraries and pages of files included.

    Raises:
        OSError: There is no such process.
    """
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """Processes that this one started and that are there, in no order, and theirs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue
        if parent == pid:
            child = int(folder.name)
            found += [child, *children(child)]
    return found


def command_line(pid: int) -> list[str]:
    """What a process was started with. Raises OSError where there is none."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
