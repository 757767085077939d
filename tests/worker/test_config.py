import click
import pagecast_native
import pytest

from worker.batch import DecodePlan
from worker.config import _MAX_THREADS, WorkerConfig, is_spawned

LISTEN = ("--listen", "127.0.0.1:0")


def test_flags_win_over_the_environment_and_that_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGECAST_WORKER_KV_BLOCKS", "7")
    monkeypatch.setenv("PAGECAST_WORKER_DECODE_PLAN", "replan")
    monkeypatch.setenv("PAGECAST_WORKER_THREADS", "3")
    config = WorkerConfig.load([*LISTEN, "--threads", "1"])
    assert (config.num_kv_blocks, config.num_threads, config.max_step_tokens) == (7, 1, 64)
    assert config.decode_plan is DecodePlan.REPLAN
    assert (config.kernels, config.max_replan_sessions) == ("auto", 32)
    monkeypatch.setenv("PAGECAST_WORKER_MAX_REPLAN_SESSIONS", "0")
    assert WorkerConfig.load(list(LISTEN)).max_replan_sessions == 0


def test_rows_follow_a_small_token_budget() -> None:
    assert WorkerConfig.load([*LISTEN, "--max-step-tokens", "24"]).max_step_rows == 24
    assert WorkerConfig.load(list(LISTEN)).max_step_rows == 32


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--kv-blocks", "0"], "--kv-blocks"),
        (["--max-step-tokens", "-1"], "--max-step-tokens"),
        (["--max-step-tokens", "8", "--max-step-rows", "9"], "--max-step-rows"),
        (["--kernels", "cuda"], "--kernels"),
        (["--max-replan-sessions", "-1"], "--max-replan-sessions"),
        (["--max-replan-sessions", "1048577"], "--max-replan-sessions"),
        (["--threads", "0"], "--threads"),
        (["--threads", "257"], "--threads"),
        (["--memory-share", "0"], "--memory-share"),
        (["--memory-share", "nan"], "--memory-share"),
        (["--no-such-flag", "1"], "--no-such-flag"),
    ],
)
def test_s24_bad_flags_are_refused_by_name(flags: list[str], named: str) -> None:
    with pytest.raises(click.ClickException) as caught:
        WorkerConfig.load([*LISTEN, *flags])
    assert caught.value.exit_code == 2
    assert named in caught.value.format_message()


def test_threads_are_limited_as_native_kernels_limit_them() -> None:
    assert _MAX_THREADS == pagecast_native.MAX_THREADS


def test_a_worker_knows_whether_a_gateway_started_it() -> None:
    assert is_spawned(["--listen", "x", "--parent-fd", "5"])
    assert is_spawned(["--parent-fd=5"])
    assert not is_spawned(["--listen", "--parent"])
