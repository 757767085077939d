"""The threads of a worker's process: where they run, and that they sleep while there is nothing to do."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_gguf


@contextmanager
def worker(folder: Path, *flags: str) -> Iterator[int]:
    """A worker that is ready; its pid."""
    path = write_tiny_gguf(folder / "tiny.gguf")
    command = [sys.executable, "-m", "worker", "--model", str(path), "--listen", f"unix:{folder}/w.sock"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            events: list[str] = []
            while "worker_ready" not in events:
                line = process.stderr.readline()
                assert line, f"ended after {events}"
                events.append(json.loads(line)["event"])
            yield process.pid
        finally:
            process.terminate()


def cpu_s(pid: int) -> float:
    """Processor time that a process has had, in seconds."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid numbers it


def test_an_idle_worker_burns_no_cpu(tmp_path: Path) -> None:
    with worker(tmp_path, "--threads", "2", "--kernels", "native") as pid:
        time.sleep(0.5)
        before_s = cpu_s(pid)
        time.sleep(2.0)
        spent_s = cpu_s(pid) - before_s
    assert before_s > 0.5
    assert spent_s < 0.02


def test_pinned_threads_have_a_cpu_each(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("one CPU")
    with worker(tmp_path, "--threads", "2", "--kernels", "native", "--pin-threads") as pid:
        masks = [os.sched_getaffinity(int(path.name)) for path in Path(f"/proc/{pid}/task").iterdir()]
    pinned = [mask for mask in masks if len(mask) == 1]
    assert sorted(pinned, key=min) == [{cpu} for cpu in cpus]
    # Those of gRPC and the event loop may run anywhere.
    assert len(masks) > 2
