"""Settings of gateway and clients, read once from flags and environment, checked and frozen.

Only here is the environment read: `PAGECAST_` and the flag's name in capitals. Values that a caller
passes (the command line's flags) win over the environment, which wins over defaults.
A wrong value raises `pydantic.ValidationError`, which names the field.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

if TYPE_CHECKING:
    from pagecast._cpus import Cpus

DEFAULT_ADDRESS = "127.0.0.1:7070"
MAX_PORT = 65535
# Surrogates stand for bytes of a command line that are no text; gRPC takes text only.
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/\ud800-\udfff]+):([0-9]{1,5})")
_PREFIX = "PAGECAST_"
_WORKER_PREFIX = "PAGECAST_WORKER_"
# The worker's own limits: a value over them is refused here, by the name of the flag that was given.
MAX_KV_BLOCKS = 1 << 24
MAX_STEP_TOKENS = 65_536
MAX_REPLAN_SESSIONS = 1 << 20
MAX_THREADS = 256


def prepare_process() -> None:
    """Set what libraries read from the environment when they are imported; call it before they are.

    gRPC's core writes lines of its own form to standard error, where the log is. What it has to tell
    comes as errors of its calls too. What the caller has set stays.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def available_cpus() -> "Cpus":
    """Return the CPUs that this process may use, and workers that it starts."""
    # Not before: the package imports gRPC, which reads the environment then.
    from pagecast._cpus import read_cpus  # noqa: PLC0415

    return read_cpus(Path("/"), os.sched_getaffinity(0))


def worker_environment() -> dict[str, str]:
    """Return the environment for spawned workers, without variables that set a worker's flags.

    Those are for workers that somebody else starts; a spawned one has its gateway's settings.
    """
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(_WORKER_PREFIX)}


def unknown_variables(known: Collection[str]) -> list[str]:
    """Return the names of environment variables that look like settings and are not in `known`.

    Those of workers are among them: a gateway does not pass them on.
    """
    return sorted(
        name for name in os.environ if name.upper().startswith(_PREFIX) and name.upper() not in known
    )


def check_address(value: str, *, allow_unix: bool, min_port: int) -> str:
    """Return `value` if it is `HOST:PORT`, `[IPV6]:PORT` or, where allowed, `unix:PATH`.

    Raises:
        ValueError: It is neither, or the port is not from `min_port` to 65535.
    """
    if allow_unix and re.fullmatch(r"unix:[^\ud800-\udfff]+", value):
        return value
    match = _HOST_PORT.fullmatch(value)
    if match is None:
        forms = "HOST:PORT or unix:PATH" if allow_unix else "HOST:PORT"
        raise ValueError(f"expected {forms}, got {value!r}")
    if not min_port <= int(match[2]) <= MAX_PORT:
        raise ValueError(f"port must be from {min_port} to {MAX_PORT}, got {match[2]}")
    return value


class ServeSettings(BaseSettings):
    """What `pagecast serve` runs with.

    Attributes:
        model: Model spec that every spawned worker loads: a known name, or a path to a GGUF file.
        workers: Workers to spawn.
        listen: `HOST:PORT` of the public server; port 0 takes a free one.
        worker_addresses: Addresses of running workers to use instead of spawning; a comma separated
            list in the environment (`PAGECAST_WORKER_ADDRESS`).
        device: Where the spawned workers compute. "auto": on a CUDA device where there is one that the
            kernels can use, else on the CPU.
        kernels: Kernels of the spawned workers. "auto": triton on a CUDA device; on the CPU native where
            it is installed and suits the model, else reference.
        weights: What workers keep matrices as; "file": as the file has them. "auto": "file" where the kernels
            take it, else "float32".
        activations: What workers' products are made of: float32, eight bits beside quantised weights, or
            bfloat16. "auto": "int8" with native kernels where weights are quantised, else "float32".
        kv_dtype: What workers keep keys and values as. "auto": 16 bits, but float32 with reference kernels.
        decode_plan: Plan mode of sessions that name none; "plan_once" becomes "once".
        kv_blocks: KV blocks per worker. None: what the worker chooses.
        max_step_tokens: Token budget of a step. None: what the worker chooses.
        max_replan_sessions: Open sessions per worker whose plan mode may be REPLAN at once.
        threads: Compute threads per worker. None: the CPUs, shared out among the workers, as far as the
            cgroups' quota goes.
        pin_threads: Whether each compute thread stays on a CPU of its own.
        numa: Whether each worker runs on one NUMA node, with its memory there; without `workers` one a node.
        start_timeout_s: How long workers may take until they serve, in seconds
            (`PAGECAST_START_TIMEOUT`).
        worker_timeout_s: A worker that answers nothing for so long is lost, in seconds
            (`PAGECAST_WORKER_TIMEOUT`).
        step_timeout_s: So is one whose step takes longer (`PAGECAST_STEP_TIMEOUT`).
        drain_timeout_s: How long running turns may go on after SIGTERM, in seconds
            (`PAGECAST_DRAIN_TIMEOUT`).
        log_level: Least severe level that is logged.

    Names of devices, kernels, number formats, plans and levels are taken in any case.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="forbid", populate_by_name=True)

    model: str = Field(default="smollm2-135m", min_length=1)
    workers: int = Field(default=1, ge=1, le=64)
    listen: str = DEFAULT_ADDRESS
    worker_addresses: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), validation_alias="PAGECAST_WORKER_ADDRESS"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "native", "reference", "triton"] = "auto"
    weights: Literal["auto", "file", "float32", "float16", "bfloat16"] = "auto"
    activations: Literal["auto", "float32", "int8", "bfloat16"] = "auto"
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "float8_e4m3fn"] = "auto"
    decode_plan: Literal["once", "replan"] = "once"
    kv_blocks: int | None = Field(default=None, ge=1, le=MAX_KV_BLOCKS)
    max_step_tokens: int | None = Field(default=None, ge=1, le=MAX_STEP_TOKENS)
    max_replan_sessions: int = Field(default=32, ge=0, le=MAX_REPLAN_SESSIONS)
    threads: int | None = Field(default=None, ge=1, le=MAX_THREADS)
    pin_threads: bool = False
    numa: bool = False
    start_timeout_s: float = Field(
        default=180.0, gt=0.0, le=86_400.0, validation_alias="PAGECAST_START_TIMEOUT"
    )
    worker_timeout_s: float = Field(
        default=10.0, ge=0.1, le=86_400.0, validation_alias="PAGECAST_WORKER_TIMEOUT"
    )
    step_timeout_s: float = Field(
        default=300.0, gt=0.0, le=86_400.0, validation_alias="PAGECAST_STEP_TIMEOUT"
    )
    drain_timeout_s: float = Field(
        default=10.0, ge=0.0, le=86_400.0, validation_alias="PAGECAST_DRAIN_TIMEOUT"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator(
        "device", "kernels", "weights", "activations", "kv_dtype", "decode_plan", "log_level", mode="before"
    )
    @classmethod
    def _any_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("decode_plan", mode="before")
    @classmethod
    def _plan_names(cls, value: object) -> object:
        # The proto's name of it, as `generate --plan` takes it too.
        return "once" if isinstance(value, str) and value.lower() == "plan_once" else value

    @field_validator("listen")
    @classmethod
    def _listen_form(cls, value: str) -> str:
        return check_address(value, allow_unix=False, min_port=0)

    @field_validator("worker_addresses", mode="before")
    @classmethod
    def _split_addresses(cls, value: object) -> object:
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value

    @field_validator("worker_addresses")
    @classmethod
    def _worker_address_form(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("the same worker address is given twice")
        return tuple(check_address(address, allow_unix=True, min_port=1) for address in value)


class ClientSettings(BaseSettings):
    """What the client commands run with.

    Attributes:
        target: `HOST:PORT` of the gateway (`PAGECAST_TARGET`).
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="forbid")

    target: str = DEFAULT_ADDRESS

    @field_validator("target")
    @classmethod
    def _target_form(cls, value: str) -> str:
        return check_address(value, allow_unix=False, min_port=1)
