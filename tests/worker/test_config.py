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
    assert (config.num_kv_blocks, config.num_threads, config.max_step_tokens) == (7, 1, None)
    assert config.decode_plan is DecodePlan.REPLAN
    assert (config.kernels, config.max_replan_sessions) == ("auto", 32)
    monkeypatch.setenv("PAGECAST_WORKER_MAX_REPLAN_SESSIONS", "0")
    assert WorkerConfig.load(list(LISTEN)).max_replan_sessions == 0


def test_what_follows_the_device_is_left_open() -> None:
    config = WorkerConfig.load(list(LISTEN))
    assert (config.device, config.weights, config.kv_dtype) == ("auto", "auto", "auto")
    assert (config.num_kv_blocks, config.max_step_tokens, config.max_step_rows) == (None, None, None)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--kv-blocks", "0"], "--kv-blocks"),
        (["--max-step-tokens", "-1"], "--max-step-tokens"),
        (["--max-step-tokens", "8", "--max-step-rows", "9"], "--max-step-rows"),
        (["--kernels", "cuda"], "--kernels"),
        (["--device", "gpu"], "--device"),
        (["--weights", "int8"], "--weights"),
        (["--kv-dtype", "int8"], "--kv-dtype"),
        (["--kernels", "native", "--device", "cuda"], "--kernels native runs on --device cpu only"),
        (["--kernels", "reference", "--device", "cuda"], "--kernels reference runs on --device cpu only"),
        (["--kernels", "native", "--weights", "file"], "--weights file needs --kernels triton"),
        (["--kernels", "native", "--kv-dtype", "float8_e4m3fn"], "--kv-dtype float8_e4m3fn needs --kernels"),
        (["--kernels", "reference", "--kv-dtype", "float16"], "--kv-dtype float16 needs --kernels triton"),
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
