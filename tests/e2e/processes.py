"""What tests ask of processes that are not their children."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process is there and more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: Iterable[int], timeout_s: float) -> None:
    """Wait until none of the processes is there."""
    pids = list(pids)
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait until the condition holds, asked again and again."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.02)
