"""What runs programs, as the plan sees it, and the choice by name. Imports only what was chosen."""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol, cast, overload

import torch
from torch import Tensor

from worker.batch import Drawn
from worker.kernels.ops import KERNELS
from worker.kv.storage import KvStorage
from worker.model.config import LlamaConfig
from worker.model.weights.store import Activations, WeightStore
from worker.plan.graph import StepInputs
from worker.plan.program import Program
from worker.sampling import Draw

if TYPE_CHECKING:
    from worker.plan.device_policy import DeviceKernels

CPU = torch.device("cpu")


class KernelsUnsuitable(ValueError):
    """The kernels do not suit the sizes or the memory of a model and its pool; the message names which."""


DrawnRun = tuple[int, int, list[Drawn | None]]
"""Of a run and the draws behind it: the time inside kernels, as `Executor.run` returns it; the time to draw,
in native code as the thread took it that took longest; and one per draw, in their order, None where no token
can be told: a logit is NaN or infinite, or all ids are banned."""


class TokenDraws(Protocol):
    """Runs a program and draws a step's tokens from its output, where that lies in host memory."""

    def prepare(self, places: Sequence[int], draws: Sequence[Draw]) -> int:
        """Takes what the next run's tokens are drawn by, before that run.

        Args:
            places: Rows of the output, each from 0 on once, in any order.
            draws: One per place.

        Returns:
            Bytes that were written for native code.

        Raises:
            ValueError: Draws are not as many, or penalties depend on a token that is not known yet.
        """

    def run_and_draw(self, num_tokens: int, num_rows: int, num_logits: int) -> DrawnRun:
        """Runs the program as `Executor.run` does, and draws what was prepared last."""


class Executor(Protocol):
    """A program over its inputs, weights and pool, all of which it keeps alive."""

    @property
    def output(self) -> Tensor:
        """[most logits, vocab] float32, the rows' stride being the arena's; each run overwrites it."""

    def run(self, num_tokens: int, num_rows: int, num_logits: int) -> int:
        """Runs every launch once over the live part of the inputs.

        Returns:
            Of its time, what was inside kernels, each as its longest thread took it, in ns; 0: not measured.
        """

    def token_draws(self, *, vocab_size: int) -> TokenDraws:
        """What runs this program and draws from its output; ids from `vocab_size` on are never drawn."""


class Kernels(Protocol):
    """Implementations of the operators, and what makes executors over them."""

    @property
    def name(self) -> str:
        """Tells apart kernels that could give other bits or run on other threads; part of a plan's key."""

    def check(self, config: LlamaConfig, kv: KvStorage) -> None:
        """Raises KernelsUnsuitable where a model over a pool can't be run."""

    def executor(self, program: Program, inputs: StepInputs, store: WeightStore, kv: KvStorage) -> Executor:
        """Binds a program to memory."""


@overload
def kernels_named(
    name: Literal["native", "reference"],
    *,
    num_threads: int = 1,
    thread_cpus: Sequence[int] = (),
    activations: Activations = "float32",
    device: torch.device = CPU,
) -> Kernels: ...


@overload
def kernels_named(
    name: str,
    *,
    num_threads: int = 1,
    thread_cpus: Sequence[int] = (),
    activations: Activations = "float32",
    device: torch.device = CPU,
) -> "Kernels | DeviceKernels": ...


def kernels_named(
    name: str,
    *,
    num_threads: int = 1,
    thread_cpus: Sequence[int] = (),
    activations: Activations = "float32",
    device: torch.device = CPU,
) -> "Kernels | DeviceKernels":
    """Imports and makes the kernels of that name.

    Args:
        name: One of `worker.kernels.ops.KERNELS`.
        num_threads: Threads of `native`, at least 1; the others use those of torch.
        thread_cpus: The CPU of each thread of `native`, the caller's first; empty: they may move.
        activations: What products are made of: "float32", or with `native` "int8" or "bfloat16".
        device: Where `triton` runs; on the CPU under its interpreter, which
            `worker.kernels.triton.prepare_triton` prepares. The others run where the pool is.

    Raises:
        ValueError: The name is unknown, `num_threads` is below 1, `triton` can't run on the device, or there
            are no such activations.
        ImportError: `native` without the distribution `pagecast-native`.
        RuntimeError: Triton's kernels can't run in this process as it was prepared.
    """
    if name not in KERNELS:
        raise ValueError(f"kernels={name!r} is none of {', '.join(KERNELS)}")
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads} is below 1")
    if name == "native":
        native = import_module("worker.plan.native")
        return cast(
            "Kernels",
            native.NativeKernels(num_threads=num_threads, thread_cpus=thread_cpus, activations=activations),
        )
    if activations != "float32":
        raise ValueError(f"activations={activations!r}: {name} kernels have float32 only")
    if name == "triton":
        return cast("DeviceKernels", import_module("worker.plan.triton_launchers").triton_kernels(device))
    return cast("Kernels", import_module("worker.plan.interpreter").InterpreterKernels(name))
