import dataclasses
import os
from pathlib import Path

import click
import pagecast_native
import pytest

from pagecast._cpus import Cpus
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


def test_threads_are_pinned_to_the_first_cpus_of_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 4, 5})
    assert WorkerConfig.load([*LISTEN, "--threads", "2"]).thread_cpus == ()
    assert WorkerConfig.load([*LISTEN, "--threads", "2", "--pin-threads"]).thread_cpus == (4, 5)
    monkeypatch.setenv("PAGECAST_WORKER_PIN_THREADS", "1")
    assert WorkerConfig.load([*LISTEN, "--threads", "3"]).thread_cpus == (4, 5, 9)
    with pytest.raises(
        click.UsageError, match=r"--pin-threads needs a CPU for each of --threads 4, .* has 3"
    ):
        WorkerConfig.load([*LISTEN, "--threads", "4"])


def test_threads_are_as_many_as_mask_and_quota_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Cpus(tuple(range(300)), None, ())

    def read(root: Path, allowed: set[int]) -> Cpus:
        assert (root, allowed) == (Path("/"), os.sched_getaffinity(0))
        return machine

    monkeypatch.setattr("pagecast._cpus.read_cpus", read)
    for quota, threads in ((None, 256), (2.5, 3), (0.1, 1)):
        machine = dataclasses.replace(machine, quota=quota)
        assert WorkerConfig.load(list(LISTEN)).num_threads == threads


def test_what_follows_the_device_is_left_open() -> None:
    config = WorkerConfig.load(list(LISTEN))
    assert (config.device, config.weights, config.kv_dtype, config.activations) == ("auto",) * 4
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
        (["--kv-dtype", "int4"], "--kv-dtype"),
        (["--activations", "float16"], "--activations"),
        (["--kernels", "native", "--device", "cuda"], "--kernels native runs on --device cpu only"),
        (["--kernels", "reference", "--device", "cuda"], "--kernels reference runs on --device cpu only"),
        (["--kernels", "reference", "--weights", "file"], "--weights file needs other kernels, reference"),
        (["--kernels", "reference", "--activations", "int8"], "--activations int8 needs other kernels"),
        (["--kernels", "triton", "--activations", "int8"], "--activations int8 needs --kernels native"),
        (
            ["--kernels", "triton", "--activations", "bfloat16"],
            "--activations bfloat16 needs --kernels native",
        ),
        (["--device", "cuda", "--activations", "bfloat16"], "--activations bfloat16 needs native kernels"),
        (["--kernels", "triton", "--kv-dtype", "int8"], "--kv-dtype int8 needs --kernels native"),
        (["--device", "cuda", "--kv-dtype", "int8"], "--kv-dtype int8 needs native kernels"),
        (["--kernels", "native", "--kv-dtype", "float8_e4m3fn"], "--kv-dtype float8_e4m3fn needs --kernels"),
        (["--kernels", "reference", "--kv-dtype", "float16"], "--kv-dtype float16 needs other kernels, ref"),
        (["--max-replan-sessions", "-1"], "--max-replan-sessions"),
        (["--max-replan-sessions", "1048577"], "--max-replan-sessions"),
        (["--threads", "0"], "--threads"),
        (["--pin-threads", "--kernels", "reference"], "--pin-threads needs native kernels"),
        (["--pin-threads", "--kernels", "triton"], "--pin-threads needs native kernels"),
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
