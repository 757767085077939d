"""Settings of one worker process: frozen, read and checked once.

From flags and PAGECAST_WORKER_… variables; the only room that touches the environment, but for Triton's.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from worker.batch import DecodePlan

if TYPE_CHECKING:
    from pagecast._cpus import Cpus

_PREFIX = "PAGECAST_WORKER_"
_PARENT_FLAG = "--parent-fd"
# The native kernels' limit.
_MAX_THREADS = 256


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is started with.

    Attributes:
        model: `smollm2-135m`, or the path of a Llama GGUF.
        listen: `unix:PATH` or `HOST:PORT`.
        device: Where model and KV pool are. "auto": the first CUDA device where there is one that the kernels
            can use, else the CPU.
        kernels: What computes the operators. "auto": triton on a CUDA device; on the CPU native where it is
            installed and suits the model, else reference.
        weights: What matrices are kept as. "file": as the file has them, quantised ones too. "auto": "file",
            but for reference kernels "float32", and for triton's on the CPU as well.
        activations: What products are made of: "float32"; "int8", where rows that meet quantised weights are
            rounded to eight bits in groups of 32; or "bfloat16", where both sides of every product are, those
            of attention too. "auto": "int8" with native kernels where weights are quantised, else "float32".
        kv_dtype: What keys and values are kept as. "auto": float16 with native kernels, bfloat16 with
            activations of that; float32 with other kernels on the CPU; on a CUDA device float16 beside
            weights of float16, else bfloat16.
        decode_plan: Mode of sessions that don't choose one.
        num_kv_blocks: Blocks of the KV pool. None: 1024 on the CPU; on a CUDA device what fits in memory.
        block_size: Tokens per block.
        max_step_tokens: Tokens that one step computes at most. None: what suits the device.
        max_step_rows: Rows of one step at most. None: what suits the device, at most `max_step_tokens`.
        max_replan_sessions: Open sessions whose mode may be REPLAN at once: their steps build a plan each
            time, and the others' next step waits for it.
        num_threads: Threads for kernels.
        thread_cpus: The CPU of each thread for native kernels; empty: they may move.
        log_level: Lowest level that is logged; tokens are logged at info.
        parent_fd: Read end of a pipe that the parent holds open: its first line is the token that calls
            have to carry (an empty one: none), its end stops the worker. -1: none.
        memory_share: Part of the device's memory that the KV pool may take; the rest is for the parent's
            other workers.
    """

    model: str
    listen: str
    device: Literal["auto", "cpu", "cuda"]
    kernels: Literal["auto", "native", "reference", "triton"]
    weights: Literal["auto", "file", "float32", "float16", "bfloat16"]
    activations: Literal["auto", "float32", "int8", "bfloat16"]
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "float8_e4m3fn"]
    decode_plan: DecodePlan
    num_kv_blocks: int | None
    block_size: int
    max_step_tokens: int | None
    max_step_rows: int | None
    max_replan_sessions: int
    num_threads: int
    thread_cpus: tuple[int, ...]
    log_level: Literal["debug", "info", "warning", "error"]
    parent_fd: int
    memory_share: float

    @classmethod
    def load(cls, arguments: Sequence[str]) -> "WorkerConfig":
        """Read flags and environment. `--help` prints its text and ends the process.

        Raises:
            click.ClickException: A flag or variable is wrong; the message names it.
        """
        try:
            given = _command.make_context("python -m worker", list(arguments)).params
        except click.exceptions.Exit as done:  # --help
            raise SystemExit(done.exit_code) from done
        cpus = available_cpus()
        if refusal := _refusal(given, cpus):
            raise click.UsageError(refusal)
        given["thread_cpus"] = cpus.allowed[: given["num_threads"]] if given.pop("pin_threads") else ()
        plan = DecodePlan.PLAN_ONCE if given.pop("plan") == "once" else DecodePlan.REPLAN
        return cls(decode_plan=plan, block_size=16, **given)


def is_spawned(arguments: Sequence[str]) -> bool:
    """Whether a gateway started this process, so that a log is read where a person reads usage text."""
    return any(argument.partition("=")[0] == _PARENT_FLAG for argument in arguments)


def prepare_process() -> None:
    """Set what libraries read from the environment when they are imported; call it before they are.

    OpenMP's default is to spin at every barrier for as long as it takes. Where another process wants
    the core of a thread that is waited for, each of the step's hundreds of barriers then lasts a
    scheduling slice: 3 s per token were seen instead of 0.1. Threads spin briefly instead, then sleep;
    decision 6 has the figures.

    gRPC's core writes lines of its own form to standard error, where the log is. What it has to tell
    comes as errors of its calls too.

    What the caller has set stays.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "5000"
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def available_cpus() -> "Cpus":
    """Return the CPUs that this process may use."""
    # Not before: the package imports gRPC, which reads the environment then.
    from pagecast._cpus import read_cpus  # noqa: PLC0415

    return read_cpus(Path("/"), os.sched_getaffinity(0))


def default_threads() -> int:
    """Return how many threads kernels get where nobody says: the CPUs, as far as the cgroups' quota goes."""
    return min(available_cpus().num_threads, _MAX_THREADS)


def _option(flag: str, name: str | None = None, **rest: Any) -> click.Option:
    """A flag that is also an environment variable, and is shown with its default."""
    variable = _PREFIX + flag.removeprefix("--").replace("-", "_").upper()
    return click.Option([flag, *([name] if name else [])], envvar=variable, show_default=True, **rest)


def _no_nan(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Refuses nan, which no range of click's does."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a number.", context, parameter)
    return value


def _refusal(given: Mapping[str, Any], cpus: "Cpus") -> str:
    """What flags can't be together, by their names; empty where nothing is wrong."""
    num_cpus, threads = len(cpus.allowed), given["num_threads"]
    if given["pin_threads"] and given["kernels"] in ("reference", "triton"):
        return f"--pin-threads needs native kernels, not --kernels {given['kernels']}"
    if given["pin_threads"] and threads > num_cpus:
        return f"--pin-threads needs a CPU for each of --threads {threads}, this process has {num_cpus}"
    rows, tokens = given["max_step_rows"], given["max_step_tokens"]
    if rows is not None and tokens is not None and rows > tokens:
        return "--max-step-rows is over --max-step-tokens"
    kernels = given["kernels"]
    if kernels in ("native", "reference") and given["device"] == "cuda":
        return f"--kernels {kernels} runs on --device cpu only; a CUDA device needs triton"
    if given["activations"] == "int8" and given["weights"] in ("float32", "float16", "bfloat16"):
        return f"--activations int8 needs quantised weights, not --weights {given['weights']}"
    settings = (("--weights", "weights"), ("--activations", "activations"), ("--kv-dtype", "kv_dtype"))
    for flag, name in settings:
        value = given[name]
        if kernels == "reference" and value not in ("auto", "float32"):
            return f"{flag} {value} needs other kernels, reference computes in float32 only"
        if value == "float8_e4m3fn" and kernels == "native":
            return f"{flag} {value} needs --kernels triton; native has int8 of that size"
        is_native = value == "int8" or (name, value) == ("activations", "bfloat16")
        if is_native and kernels == "triton":
            return f"{flag} {value} needs --kernels native"
        if is_native and given["device"] == "cuda":
            return f"{flag} {value} needs native kernels, which run on --device cpu only"
    return ""


_command = click.Command(
    "worker",
    help="One Pagecast worker: serves one model to a gateway.",
    params=[
        _option("--model", default="smollm2-135m", help="A known name, or the path of a Llama GGUF."),
        _option("--listen", required=True, help="unix:PATH or HOST:PORT."),
        _option(
            "--device",
            type=click.Choice(["auto", "cpu", "cuda"]),
            default="auto",
            help="auto: cuda where there is such a device that the kernels can use, else cpu.",
        ),
        _option(
            "--kernels",
            type=click.Choice(["auto", "native", "reference", "triton"]),
            default="auto",
            help="auto: on cuda triton; on cpu native where it is there and suits the model, else reference.",
        ),
        _option(
            "--weights",
            type=click.Choice(["auto", "file", "float32", "float16", "bfloat16"]),
            default="auto",
            help="What matrices are kept as. file: as the file has them. auto: file, where kernels take it.",
        ),
        _option(
            "--activations",
            type=click.Choice(["auto", "float32", "int8", "bfloat16"]),
            default="auto",
            help="What products are made of. auto: int8 with native kernels and quantised weights.",
        ),
        _option(
            "--kv-dtype",
            type=click.Choice(["auto", "float32", "float16", "bfloat16", "int8", "float8_e4m3fn"]),
            default="auto",
            help="What keys and values are kept as. auto: 16 bits, but float32 with reference kernels.",
        ),
        _option("--decode-plan", "plan", type=click.Choice(["once", "replan"]), default="once"),
        _option(
            "--kv-blocks",
            "num_kv_blocks",
            type=click.IntRange(1, 1 << 24),
            help="Absent: on cpu 1024, on cuda what fits in its memory.",
        ),
        _option("--max-step-tokens", type=click.IntRange(1, 65536), help="Absent: on cpu 64, on cuda 2048."),
        _option(
            "--max-step-rows",
            type=click.IntRange(1, 4096),
            help="Absent: on cpu 32, on cuda 256; at most --max-step-tokens.",
        ),
        _option(
            "--max-replan-sessions",
            type=click.IntRange(0, 1 << 20),
            default=32,
            help="Open sessions whose plan is built anew for every step.",
        ),
        _option("--threads", "num_threads", type=click.IntRange(1, _MAX_THREADS), default=default_threads),
        _option("--pin-threads", is_flag=True, help="Native kernels: keep each thread on a CPU of its own."),
        _option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info"),
        _option(_PARENT_FLAG, type=click.IntRange(min=-1), default=-1, hidden=True),
        _option(
            "--memory-share",
            type=click.FloatRange(0.0, 1.0, min_open=True),
            default=1.0,
            callback=_no_nan,
            hidden=True,
        ),
    ],
)
