from typing import Any, get_args, get_type_hints

import click
import pytest
from pydantic import ValidationError

from service.config import (
    MAX_KV_BLOCKS,
    MAX_REPLAN_SESSIONS,
    MAX_STEP_TOKENS,
    ClientSettings,
    ServeSettings,
    unknown_variables,
    worker_environment,
)
from worker.config import WorkerConfig


def test_defaults() -> None:
    settings = ServeSettings()
    assert (settings.model, settings.workers, settings.listen) == ("smollm2-135m", 1, "127.0.0.1:7070")
    assert settings.worker_addresses == ()
    assert settings.kv_blocks is None
    assert (settings.kernels, settings.max_replan_sessions) == ("auto", 32)
    assert ClientSettings().target == "127.0.0.1:7070"


def test_environment_is_read_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGECAST_WORKERS", "3")
    monkeypatch.setenv("PAGECAST_KERNELS", "triton")
    monkeypatch.setenv("PAGECAST_WORKER_ADDRESS", "a:1,unix:/run/w.sock")
    monkeypatch.setenv("PAGECAST_TARGET", "example:9")
    monkeypatch.setenv("PAGECAST_START_TIMEOUT", "7.5")
    monkeypatch.setenv("PAGECAST_WORKER_TIMEOUT", "2")
    monkeypatch.setenv("PAGECAST_STEP_TIMEOUT", "3")
    monkeypatch.setenv("PAGECAST_DRAIN_TIMEOUT", "0")
    monkeypatch.setenv("PAGECAST_MAX_REPLAN_SESSIONS", "0")
    settings = ServeSettings(kernels="reference")
    assert (settings.worker_timeout_s, settings.step_timeout_s, settings.drain_timeout_s) == (2.0, 3.0, 0.0)
    assert settings.max_replan_sessions == 0
    assert (settings.workers, settings.kernels, settings.start_timeout_s) == (3, "reference", 7.5)
    assert ServeSettings(start_timeout_s=8.0).start_timeout_s == 8.0
    assert settings.worker_addresses == ("a:1", "unix:/run/w.sock")
    assert ServeSettings(worker_addresses=("b:2",)).worker_addresses == ("b:2",)
    assert ClientSettings().target == "example:9"


def test_environment_without_prefix_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "x")
    monkeypatch.setenv("WORKER_ADDRESSES", "a:1")
    assert ServeSettings() == ServeSettings(model="smollm2-135m", worker_addresses=())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""), ("workers", 0), ("workers", 65), ("workers", "many"),
        ("listen", "7070"), ("listen", ":7070"), ("listen", "a:70000"), ("listen", "a b:1"),
        ("listen", "unix:/x"), ("worker_addresses", ("a",)), ("worker_addresses", ("a:0",)),
        ("worker_addresses", ("a:1", "a:1")), ("worker_addresses", ("unix:",)), ("kernels", "cuda"),
        ("device", "triton"), ("weights", "q8_0"), ("kv_dtype", "file"), ("activations", "int4"),
        ("decode_plan", "twice"), ("kv_blocks", 0), ("kv_blocks", 2**24 + 1),
        ("max_step_tokens", 0), ("max_step_tokens", 65_537), ("threads", 0), ("threads", 257),
        ("max_replan_sessions", -1), ("max_replan_sessions", 2**20 + 1), ("max_replan_sessions", "few"),
        ("worker_addresses", ("unix:\udcff",)), ("worker_addresses", ("a\udcff:1",)),
        ("start_timeout_s", 0.0), ("start_timeout_s", float("nan")), ("start_timeout_s", 86_401.0),
        ("worker_timeout_s", 0.0), ("worker_timeout_s", float("nan")), ("step_timeout_s", 0.0),
        ("step_timeout_s", float("inf")), ("drain_timeout_s", -0.1), ("drain_timeout_s", 86_401.0),
        ("log_level", "loud"),
    ],
)  # fmt: skip
def test_wrong_values_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        ServeSettings(**{field: value})
    (error,) = caught.value.errors()
    assert error["loc"][0] in {
        field,
        "PAGECAST_" + field.removesuffix("_s").upper(),
        "PAGECAST_WORKER_ADDRESS",
    }


def test_unknown_names_and_changes_are_refused() -> None:
    with pytest.raises(ValidationError, match="worker_count"):
        ServeSettings(worker_count=1)
    with pytest.raises(ValidationError, match="frozen"):
        ServeSettings().workers = 2  # type: ignore[misc]


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:7070", "0.0.0.0:1", "my-host.local:65535"])
def test_addresses(listen: str) -> None:
    assert ServeSettings(listen=listen).listen == listen


def test_names_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGECAST_DECODE_PLAN", "PLAN_ONCE")
    monkeypatch.setenv("PAGECAST_LOG_LEVEL", "WARNING")
    settings = ServeSettings(kernels="Native")  # type: ignore[arg-type]  # what is tested
    assert (settings.decode_plan, settings.log_level, settings.kernels) == ("once", "warning", "native")
    assert ServeSettings(decode_plan="REPLAN").decode_plan == "replan"  # type: ignore[arg-type]


def test_unknown_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "PAGECAST_B",
        "pagecast_a",
        "PAGECAST_KNOWN",
        "pagecast_known",
        "PAGECAST_WORKER_X",
        "PAGECAST",
    ):
        monkeypatch.setenv(name, "1")
    assert unknown_variables({"PAGECAST_KNOWN"}) == ["PAGECAST_B", "PAGECAST_WORKER_X", "pagecast_a"]


def test_a_spawned_workers_environment_has_no_flags_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGECAST_WORKER_KV_BLOCKS", "pagecast_worker_threads", "PAGECAST_WORKERS", "OMP_X"):
        monkeypatch.setenv(name, "1")
    environment = worker_environment()
    assert {"PAGECAST_WORKERS", "OMP_X", "PATH"} <= environment.keys()
    assert not [name for name in environment if name.upper().startswith("PAGECAST_WORKER_")]


@pytest.mark.parametrize("name", ["device", "kernels", "weights", "activations", "kv_dtype"])
def test_the_workers_choices_are_the_gateways(name: str) -> None:
    (mine, workers) = (get_type_hints(each)[name] for each in (ServeSettings, WorkerConfig))
    assert get_args(mine) == get_args(workers)
    flag = "--" + name.replace("_", "-")
    for value in get_args(mine):
        config = WorkerConfig.load(["--listen", "a:1", flag, value])
        assert getattr(config, name) == value == getattr(ServeSettings(**{name: value.upper()}), name)


def test_the_workers_limits_are_the_gateways() -> None:
    """A value that the gateway lets through must not end in a worker's usage text."""
    flags = {
        "--kv-blocks": MAX_KV_BLOCKS,
        "--max-step-tokens": MAX_STEP_TOKENS,
        "--max-replan-sessions": MAX_REPLAN_SESSIONS,
    }
    config = WorkerConfig.load(["--listen", "a:1", *(str(word) for flag in flags.items() for word in flag)])
    assert (config.num_kv_blocks, config.max_step_tokens) == (MAX_KV_BLOCKS, MAX_STEP_TOKENS)
    assert config.max_replan_sessions == MAX_REPLAN_SESSIONS
    for flag, most in flags.items():
        with pytest.raises(click.BadParameter) as caught:
            WorkerConfig.load(["--listen", "a:1", flag, str(most + 1)])
        assert flag in caught.value.format_message()
