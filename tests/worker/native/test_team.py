"""A team seen from Python: which CPUs its threads run on, and processes that end in the middle of a run."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pagecast_native
import pytest

# A run of some 20 ms, over and over in a daemon thread; the process ends meanwhile.
BUSY_CHILD = """
import sys, threading, time
import numpy as np
import pagecast_native as native

weight = native.PackedMatrix([np.ones((4096, 1024), np.float32)])
arena = np.ones(64 * (1024 + 4096), np.float32)
team = native.Team(int(sys.argv[1]))
program = native.Program(team, max_tokens=64, max_rows=1)
program.linear(
    native.View(arena, 0, 1024, 1024, "T"), weight, native.View(arena, 64 * 1024, 4096, 4096, "T")
)
runs = []

def work():
    while True:
        program.run(64, 1, 1)
        runs.append(None)

threading.Thread(target=work, daemon=True).start()
while len(runs) < 2:
    time.sleep(0.001)
print("ran", flush=True)
"""


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_process_may_end_while_a_daemon_thread_runs_a_program(num_threads: int) -> None:
    for _ in range(3):
        child = subprocess.run(
            [sys.executable, "-c", BUSY_CHILD, str(num_threads)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (child.returncode, child.stdout, child.stderr) == (0, "ran\n", "")


def affinities() -> dict[int, set[int]]:
    """CPUs of each thread of this process."""
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    return {thread: os.sched_getaffinity(thread) for thread in threads}


def test_pinned_threads_stay_on_their_cpus() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("one CPU")
    before = affinities()
    found: dict[int, set[int]] = {}

    def make() -> None:  # in a thread that ends: a caller of a run stays pinned
        team = pagecast_native.Team(2, cpus[::-1])
        found.update({thread: on for thread, on in affinities().items() if thread not in before})
        found.pop(threading.get_native_id())
        team.close()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert list(found.values()) == [{cpus[0]}]
    after = affinities()
    assert {thread: after[thread] for thread in before} == before


@pytest.mark.parametrize(
    ("num_threads", "cpus", "error"),
    [
        (2, [0], "cpus: 1, must be one for each of 2 threads"),
        (1, [], "cpus: none"),
        (1, [1 << 20], "cpus: 1048576 is none that"),
        (1, [-1], "cpus: -1 is none that"),
    ],
)
def test_cpus_are_refused_by_name(num_threads: int, cpus: list[int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        pagecast_native.Team(num_threads, cpus)


def test_a_cpu_is_refused_twice() -> None:
    cpu = min(os.sched_getaffinity(0))
    with pytest.raises(ValueError, match=f"cpus: {cpu} is there twice"):
        pagecast_native.Team(2, (cpu, cpu))
