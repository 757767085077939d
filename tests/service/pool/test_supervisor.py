"""What is left when a process of the gateway's is killed, and what the supervisor lets pass."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.pool import Incarnation, supervisor
from tests.service.conftest import until
from tests.service.pool.conftest import Watched, folder_of, is_running, script, told


async def test_a_supervisor_that_is_killed_takes_stopped_workers_with_it(
    start_pool: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = start_pool(*script(tmp_path, "--stubborn"), workers=2)
    pids = []
    for index in range(2):
        incarnation = await watched.pool.next(index)
        await told(tmp_path, incarnation)
        pids.append(incarnation.pid)
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(watched.pool.supervisor_pid, signal.SIGKILL)
    await until(lambda: not any(map(is_running, pids)), timeout_s=2.0)
    await asyncio.wait_for(watched.watching, 2.0)
    watched.pool.kill(0, Incarnation("", pids[0]))  # nobody there: no error
    watched.pool.stop(1.0)
    assert not folder_of(incarnation).exists()


async def test_the_supervisor_lets_signals_of_a_terminal_pass(
    start_pool: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = start_pool()
    incarnation = await watched.pool.next(0)
    await told(tmp_path, incarnation)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(watched.pool.supervisor_pid, number)
    await asyncio.sleep(0.2)
    assert is_running(watched.pool.supervisor_pid)
    assert is_running(incarnation.pid)
    groups = {os.getpgid(pid) for pid in (os.getpid(), watched.pool.supervisor_pid, incarnation.pid or 0)}
    assert len(groups) == 3


def test_g03_nothing_outlives_a_gateway_that_is_killed(tmp_path: Path) -> None:
    gateway_script = f"""
import sys, time
from service.config import ServeSettings
from service.pool import local
local.worker_command = lambda settings: {script(tmp_path, "--stubborn")!r}
pool = local.LocalPool.start(ServeSettings(workers=2), None)
print(pool.supervisor_pid, flush=True)
time.sleep(60)
"""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    gateway = subprocess.Popen(
        [sys.executable, "-c", gateway_script],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert gateway.stdout is not None
    supervisor_pid = int(gateway.stdout.readline())
    wait_until(lambda: len(list(tmp_path.glob("told-*"))) == 2)
    children = Path(f"/proc/{supervisor_pid}/task/{supervisor_pid}/children")
    pids = [int(pid) for pid in children.read_text().split()]
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGSTOP)
    gateway.kill()
    gateway.wait()
    gateway.stdout.close()
    wait_until(lambda: not any(map(is_running, [supervisor_pid, *pids])), timeout_s=2.0)
    assert list(temporary.iterdir()) == []


def wait_until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_the_supervisor_needs_nothing_but_the_standard_library() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(supervisor.__file__)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert {name.partition(".")[0] for name in loaded.stdout.split()} <= {
        *sys.stdlib_module_names,
        "__main__",
    }
