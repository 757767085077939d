"""The pool around real processes; what they run is a script of the test instead of a worker."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.config import ServeSettings
from service.errors import StartError
from service.pool import local
from service.pool.local import LocalPool, worker_command

# Reads its own command line as a worker would: ends when the pipe of --parent-fd does.
SCRIPT = """
import os, signal, sys, threading
fd = int(sys.argv[sys.argv.index("--parent-fd") + 1])
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print("up", flush=True)
os.read(fd, 1)
os._exit(7)
"""


def script_command(*extra: str) -> object:
    def command(settings: ServeSettings, address: str, parent_fd: int) -> list[str]:
        return [sys.executable, "-c", SCRIPT, "--parent-fd", str(parent_fd), *extra]

    return command


@pytest.fixture
def pools() -> Iterator[list[LocalPool]]:
    made: list[LocalPool] = []
    yield made
    for pool in made:
        pool.stop(0.0)


def wait_until_up(pool: LocalPool) -> None:
    time.sleep(0.3)
    assert all(pool.exit_code(address) is None for address in pool.addresses)


def test_command_line() -> None:
    settings = ServeSettings(
        model="m.gguf", kernels="triton", decode_plan="replan", kv_blocks=64, threads=2, log_level="debug"
    )
    assert worker_command(settings, "unix:/x/0.sock", 9)[1:] == [
        "-m", "worker", "--model", "m.gguf", "--listen", "unix:/x/0.sock", "--kernels", "triton",
        "--decode-plan", "replan", "--threads", "2", "--log-level", "debug", "--parent-fd", "9",
        "--kv-blocks", "64",
    ]  # fmt: skip


def test_stop_ends_processes_and_removes_the_folder(
    monkeypatch: pytest.MonkeyPatch, pools: list[LocalPool]
) -> None:
    monkeypatch.setattr(local, "worker_command", script_command())
    pool = LocalPool.spawn(ServeSettings(workers=2))
    pools.append(pool)
    first, second = pool.addresses
    folder = Path(first.removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert first != second
    wait_until_up(pool)
    started_s = time.monotonic()
    pool.stop(5.0)
    assert time.monotonic() - started_s < 3
    # 7: the pipe closed before the signal came.
    assert {pool.exit_code(first), pool.exit_code(second)} <= {0, 7}
    assert not folder.exists()
    pool.stop(5.0)


def test_a_worker_has_the_gateways_settings_and_no_variables_of_its_own(
    monkeypatch: pytest.MonkeyPatch, pools: list[LocalPool], tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGECAST_WORKER_KV_BLOCKS", "3")
    monkeypatch.setenv("PAGECAST_KV_BLOCKS", "5")
    out = tmp_path / "environment"
    script = f"import os; open({str(out)!r}, 'w').write(' '.join(os.environ))"
    monkeypatch.setattr(local, "worker_command", lambda *_: [sys.executable, "-c", script])
    pool = LocalPool.spawn(ServeSettings())
    pools.append(pool)
    pool._processes[pool.addresses[0]].wait(10)
    names = out.read_text().split()
    assert "PAGECAST_KV_BLOCKS" in names
    assert "PAGECAST_WORKER_KV_BLOCKS" not in names


def test_a_process_that_ignores_sigterm_is_killed(
    monkeypatch: pytest.MonkeyPatch, pools: list[LocalPool]
) -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    monkeypatch.setattr(local, "worker_command", lambda *_: [sys.executable, "-c", script])
    pool = LocalPool.spawn(ServeSettings())
    pools.append(pool)
    wait_until_up(pool)
    started_s = time.monotonic()
    pool.stop(0.2)
    assert time.monotonic() - started_s < 3
    assert pool.exit_code(pool.addresses[0]) == -signal.SIGKILL


def test_workers_do_not_outlive_a_gateway_that_is_killed(tmp_path: Path) -> None:
    gateway_script = f"""
import subprocess, sys, time
from service.config import ServeSettings
from service.pool import local
local.worker_command = lambda settings, address, fd: [
    sys.executable, "-c", {SCRIPT!r}, "--parent-fd", str(fd), "--stubborn"]
pool = local.LocalPool.spawn(ServeSettings(workers=2))
print(*(process.pid for process in pool._processes.values()), flush=True)
time.sleep(60)
"""
    gateway = subprocess.Popen(
        [sys.executable, "-c", gateway_script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed gateway leaves its folder
    )
    assert gateway.stdout is not None
    pids: list[int] = []
    while len(pids) < 2:
        pids = [int(word) for word in gateway.stdout.readline().split() if word.isdigit()]
    gateway.kill()
    gateway.wait()
    gateway.stdout.close()
    deadline_s = time.monotonic() + 5
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        # The last field before the numbers: Z is a process that ended and is not yet reaped.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_command_that_is_not_there_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "worker_command", lambda *_: ["/nowhere/python"])
    num_fds = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(StartError, match="cannot start a worker"):
        LocalPool.spawn(ServeSettings())
    assert len(os.listdir("/proc/self/fd")) == num_fds  # noqa: PTH208


def test_a_folder_too_long_for_a_socket_is_a_start_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("d" * 100)
    folder.mkdir()
    monkeypatch.setattr(local.tempfile, "mkdtemp", lambda prefix: str(folder))
    with pytest.raises(StartError, match="too long"):
        LocalPool.spawn(ServeSettings())
    assert not folder.exists()
