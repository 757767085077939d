"""The pool around real processes; what they run is a script of the test instead of a worker."""

import asyncio
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from service.config import ServeSettings
from service.errors import StartError
from service.pool import Incarnation, local
from service.pool.local import LocalPool, worker_command
from tests.service.conftest import until
from tests.service.pool.conftest import NoLog, Watched, folder_of, holds, is_running, script, socket_of, told


def test_command_line() -> None:
    settings = ServeSettings(
        model="m.gguf", kernels="triton", decode_plan="replan", kv_blocks=64, threads=2, log_level="debug",
        workers=4, max_replan_sessions=3, device="cuda", weights="file", kv_dtype="float16", pin_threads=True,
        activations="int8",
    )  # fmt: skip
    assert worker_command(settings)[1:] == [
        "-m", "worker", "--model", "m.gguf", "--device", "cuda", "--kernels", "triton", "--weights", "file",
        "--activations", "int8", "--kv-dtype", "float16", "--decode-plan", "replan",
        "--max-replan-sessions", "3", "--log-level", "debug", "--kv-blocks", "64", "--pin-threads",
    ]  # fmt: skip


async def test_workers_get_a_token_that_no_command_line_or_environment_holds(
    start_pool: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = start_pool(workers=2)
    first, second = [await watched.pool.next(index) for index in range(2)]
    assert first.address != second.address
    assert stat.S_IMODE(folder_of(first).stat().st_mode) == 0o700
    assert await told(tmp_path, first) == await told(tmp_path, second) == watched.pool.token
    assert len(watched.pool.token) == 32
    for pid in (first.pid, second.pid, watched.pool.supervisor_pid):
        for name in ("cmdline", "environ"):
            assert not holds(Path(f"/proc/{pid}/{name}"), watched.pool.token)
    assert watched.log.events("worker_started") == [
        {"index": index, "pid": incarnation.pid} for index, incarnation in enumerate((first, second))
    ]


async def test_stop_ends_processes_and_removes_the_folder(
    start_pool: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = start_pool(workers=2)
    incarnations = [await watched.pool.next(index) for index in range(2)]
    for incarnation in incarnations:
        await told(tmp_path, incarnation)
    started_s = time.monotonic()
    await asyncio.to_thread(watched.pool.stop, 5.0)
    assert time.monotonic() - started_s < 3
    assert not any(is_running(incarnation.pid) for incarnation in incarnations)
    assert not is_running(watched.pool.supervisor_pid)
    assert not folder_of(incarnations[0]).exists()
    watched.pool.stop(5.0)


async def test_a_process_that_ignores_sigterm_is_killed(
    start_pool: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = start_pool(*script(tmp_path, "--stubborn"))
    incarnation = await watched.pool.next(0)
    await told(tmp_path, incarnation)
    started_s = time.monotonic()
    await asyncio.to_thread(watched.pool.stop, 0.2)
    assert 0.15 < time.monotonic() - started_s < 2
    assert not is_running(incarnation.pid)


async def test_a_second_stop_shortens_the_first_ones_grace(
    start_pool: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = start_pool(*script(tmp_path, "--stubborn"))
    incarnation = await watched.pool.next(0)
    await told(tmp_path, incarnation)
    ending = asyncio.create_task(asyncio.to_thread(watched.pool.stop, 30.0))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(watched.pool.stop, 0.0)
    await asyncio.wait_for(ending, 3.0)
    assert not is_running(incarnation.pid)


async def test_an_ended_process_is_followed_by_another_each_later_than_the_last(
    start_pool: Callable[..., Watched],
) -> None:
    watched = start_pool(sys.executable, "-c", "raise SystemExit(9)")
    incarnations = [await asyncio.wait_for(watched.pool.next(0), 5.0) for _ in range(3)]
    assert len({incarnation.address for incarnation in incarnations}) == 3
    await until(lambda: incarnations[2].exit_code == 9)
    assert [incarnation.exit_code for incarnation in incarnations] == [9, 9, 9]
    # The last end is told when its place is asked for once more: before that nothing need follow it.
    assert len(watched.log.events("worker_restarting")) == 2
    waiting = asyncio.create_task(watched.pool.next(0))
    await asyncio.sleep(0)
    restarts = watched.log.events("worker_restarting")
    assert [(restart["exit_code"], restart["restart_in_s"]) for restart in restarts] == [
        (9, 0.1), (9, 0.2), (9, 0.4),
    ]  # fmt: skip
    assert [restart["pid"] for restart in restarts] == [incarnation.pid for incarnation in incarnations]
    waiting.cancel()


async def test_an_end_is_told_at_once_where_the_next_is_awaited_and_before_the_next_start(
    start_pool: Callable[..., Watched],
) -> None:
    watched = start_pool(sys.executable, "-c", "raise SystemExit(9)")
    await until(lambda: len(watched.log.events("worker_started")) == 2)
    assert [event for event, _ in watched.log.told] == [
        "worker_started",
        "worker_restarting",
        "worker_started",
    ]
    for _ in range(2):
        await watched.pool.next(0)
    waiting = asyncio.create_task(watched.pool.next(0))
    await until(lambda: len(watched.log.events("worker_restarting")) == 2)
    assert len(watched.log.events("worker_started")) == 2
    waiting.cancel()


async def test_a_stopped_process_can_be_killed_and_the_next_one_is_left_alone(
    start_pool: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = start_pool()
    first = await watched.pool.next(0)
    assert first.pid is not None
    await told(tmp_path, first)
    os.kill(first.pid, signal.SIGSTOP)
    watched.pool.kill(0, first)
    second = await asyncio.wait_for(watched.pool.next(0), 5.0)
    assert first.exit_code == -signal.SIGKILL
    assert not socket_of(first).exists()
    watched.pool.kill(0, first)
    watched.pool.kill(0, Incarnation(second.address, first.pid))  # what a late order looks like
    await told(tmp_path, second)
    await asyncio.sleep(0.2)
    assert is_running(second.pid)


async def test_a_worker_has_the_gateways_settings_and_no_variables_of_its_own(
    monkeypatch: pytest.MonkeyPatch, start_pool: Callable[..., Watched], tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGECAST_WORKER_KV_BLOCKS", "3")
    monkeypatch.setenv("PAGECAST_KV_BLOCKS", "5")
    out = tmp_path / "environment"
    watched = start_pool(
        sys.executable, "-c", f"import os; open({str(out)!r}, 'w').write(' '.join(os.environ))"
    )
    incarnation = await watched.pool.next(0)
    await until(lambda: incarnation.exit_code == 0)
    names = out.read_text().split()
    assert "PAGECAST_KV_BLOCKS" in names
    assert "PAGECAST_WORKER_KV_BLOCKS" not in names


async def test_a_command_that_is_not_there_is_told_by_its_error(start_pool: Callable[..., Watched]) -> None:
    watched = start_pool("/nowhere/python")
    incarnation = await asyncio.wait_for(watched.pool.next(0), 5.0)
    assert "No such file" in incarnation.error
    assert watched.log.told == []
    await asyncio.wait_for(watched.pool.next(0), 5.0)
    assert watched.log.events("worker_restarting")[0]["restart_in_s"] == 0.1


@pytest.mark.parametrize("breakage", ["no interpreter", "long folder"])
def test_a_start_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, breakage: str
) -> None:
    folder = tmp_path / ("d" * 100 if breakage == "long folder" else "d")
    folder.mkdir()
    monkeypatch.setattr(local.tempfile, "mkdtemp", lambda prefix: str(folder))
    if breakage == "no interpreter":
        monkeypatch.setattr(local.sys, "executable", "/nowhere/python")
    num_fds = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(StartError, match="too long" if breakage == "long folder" else "cannot start"):
        LocalPool.start(ServeSettings(), NoLog())  # type: ignore[arg-type]
    assert not folder.exists()
    assert len(os.listdir("/proc/self/fd")) == num_fds  # noqa: PTH208
