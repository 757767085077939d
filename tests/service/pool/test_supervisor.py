"""What is left when a process of the gateway's is killed, and what the supervisor lets pass."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.config import ServeSettings
from service.pool import Incarnation, local, supervisor
from service.pool.local import LocalPool
from tests.service.conftest import until
from tests.service.pool.conftest import NoLog, Watched, folder_of, is_running, script, told


async def test_a_supervisor_that_is_killed_takes_stopped_workers_with_it(
    start_pool: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = start_pool(*script(tmp_path, "--stubborn"), workers=2)
    incarnations = [await watched.pool.next(index) for index in range(2)]
    for incarnation in incarnations:
        await told(tmp_path, incarnation)
    pids = [incarnation.pid or 0 for incarnation in incarnations]
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(watched.pool.supervisor_pid, signal.SIGKILL)
    await until(lambda: not any(map(is_running, pids)), timeout_s=2.0)
    await asyncio.wait_for(watched.watching, 2.0)
    # Nobody told how they ended, and it is known all the same.
    assert [incarnation.exit_code for incarnation in incarnations] == [-signal.SIGKILL] * 2
    watched.pool.kill(0, Incarnation("", pids[0]))  # nobody there: no error
    watched.pool.stop(1.0)
    assert not folder_of(incarnation).exists()


async def test_an_end_that_was_told_stays_as_it_was_told(
    start_pool: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = start_pool(sys.executable, "-c", "raise SystemExit(9)")
    incarnation = await watched.pool.next(0)
    await until(lambda: incarnation.exit_code is not None)
    os.kill(watched.pool.supervisor_pid, signal.SIGKILL)
    await asyncio.wait_for(watched.watching, 2.0)
    assert incarnation.exit_code == 9


class Places:
    """A supervisor that starts nothing, and the time that its one place is told."""

    def __init__(self, gateway: socket.socket, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self._folder = folder
        self._supervisor = supervisor.Supervisor(
            gateway, command=["none"], places=[{"arguments": [], "cpus": None}], token="t", folder=folder
        )
        (self.worker,) = self._supervisor._workers

    def end_after(self, ran_s: float) -> float:
        """Let a process of the place end after `ran_s`; the wait before the next one, in seconds."""
        read_end, self.worker.lifeline = os.pipe()
        os.close(read_end)
        self.worker.path = self._folder / "0-1.sock"
        self.worker.started_s = self.now_s
        self.now_s += ran_s
        wait_s = self._supervisor._leave(self.worker)
        assert self.worker.start_at_s == self.now_s + wait_s
        return wait_s


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    ours, theirs = socket.socketpair()
    with ours, theirs, monkeypatch.context() as patch:
        yield Places(theirs, tmp_path, patch)


def test_the_wait_before_a_restart_doubles_up_to_a_limit(places: Places) -> None:
    waits_s = [places.end_after(0.5) for _ in range(12)]
    doubled_s = [supervisor.FIRST_BACKOFF_S * 2**power for power in range(12)]
    assert doubled_s[-1] > supervisor.MAX_BACKOFF_S
    assert waits_s == pytest.approx([min(wait_s, supervisor.MAX_BACKOFF_S) for wait_s in doubled_s])


def test_a_process_that_ran_for_long_starts_the_waits_anew(places: Places) -> None:
    waits_s = [places.end_after(ran_s) for ran_s in (0.5, 0.5, supervisor.STEADY_S - 0.5)]
    assert waits_s == pytest.approx([supervisor.FIRST_BACKOFF_S * factor for factor in (1, 2, 4)])
    assert places.end_after(supervisor.STEADY_S) == supervisor.FIRST_BACKOFF_S
    assert places.end_after(0.5) == supervisor.FIRST_BACKOFF_S * 2


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


def test_g03_nothing_outlives_a_gateway_that_is_killed(tmp_path: Path, short_folder: Path) -> None:
    gateway_script = f"""
import sys, time
from service.config import ServeSettings
from service.pool import local
local.worker_command = lambda settings: {script(tmp_path, "--stubborn")!r}
pool = local.LocalPool.start(ServeSettings(workers=2), None)
print(pool.supervisor_pid, flush=True)
time.sleep(60)
"""
    gateway = subprocess.Popen(
        [sys.executable, "-c", gateway_script],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(short_folder)},
    )
    assert gateway.stdout is not None
    try:
        supervisor_pid = int(gateway.stdout.readline())
        wait_until(lambda: len(list(tmp_path.glob("told-*"))) == 2)
        children = Path(f"/proc/{supervisor_pid}/task/{supervisor_pid}/children")
        pids = [int(pid) for pid in children.read_text().split()]
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGSTOP)
    finally:
        gateway.kill()
        gateway.wait()
        gateway.stdout.close()
    wait_until(lambda: not any(map(is_running, [supervisor_pid, *pids])), timeout_s=2.0)
    assert list(short_folder.iterdir()) == []


def wait_until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16])
def test_a_stop_at_any_early_moment_ends_all_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    monkeypatch.setattr(local, "worker_command", lambda _: script(tmp_path))
    pool = LocalPool.start(ServeSettings(workers=2), NoLog())  # type: ignore[arg-type]
    time.sleep(delay_s)
    pool.stop(0.0)
    assert pool._process.returncode == 0
    assert not pool._folder.exists()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("chunks", ["one", "orders cut", "byte by byte"])
def test_orders_may_come_with_the_first_line_and_in_any_pieces(tmp_path: Path, chunks: str) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    places = [{"arguments": [], "cpus": None}]
    first = {"command": ["/nowhere"], "places": places, "token": "t", "folder": str(folder)}
    orders = [first, {"kill": 0, "pid": 1}, {"stop": 5.0}]
    sent = b"".join(json.dumps(order).encode() + b"\n" for order in orders)
    cuts = {"one": [], "orders cut": [sent.index(b"\n") + 5], "byte by byte": [*range(1, len(sent))]}[chunks]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(supervisor.__file__), str(theirs.fileno())],
            stderr=subprocess.PIPE, pass_fds=(theirs.fileno(),),
        )  # fmt: skip
        theirs.close()
        for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            ours.sendall(sent[start:end])
            time.sleep(0 if chunks == "byte by byte" else 0.2)
        _, told = process.communicate(timeout=5)
        assert (process.returncode, told) == (0, b"")
        # Told to stop together with the rest it starts nothing.
        assert chunks != "one" or ours.recv(4096) == b""
    assert not folder.exists()


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
