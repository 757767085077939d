"""What runs programs, as the plan sees it, and the choice by name. Imports only what was chosen."""

from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol, cast, overload

import torch
from torch import Tensor

from worker.kernels.ops import KERNELS
from worker.kv.storage import KvStorage
from worker.model.config import LlamaConfig
from worker.model.weights.store import WeightStore
from worker.plan.graph import StepInputs
from worker.plan.program import Program

if TYPE_CHECKING:
    from worker.plan.device_policy import DeviceKernels

CPU = torch.device("cpu")


class KernelsUnsuitable(ValueError):
    """The kernels do not suit the sizes or the memory of a model and its pool; the message names which."""


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
    name: Literal["native", "reference"], *, num_threads: int = 1, device: torch.device = CPU
) -> Kernels: ...


@overload
def kernels_named(
    name: str, *, num_threads: int = 1, device: torch.device = CPU
) -> "Kernels | DeviceKernels": ...


def kernels_named(
    name: str, *, num_threads: int = 1, device: torch.device = CPU
) -> "Kernels | DeviceKernels":
    """Imports and makes the kernels of that name.

    Args:
        name: One of `worker.kernels.ops.KERNELS`.
        num_threads: Threads of `native`, at least 1; the others use those of torch.
        device: Where `triton` runs; on the CPU under its interpreter, which
            `worker.kernels.triton.prepare_triton` prepares. The others run where the pool is.

    Raises:
        ValueError: The name is unknown, `num_threads` is below 1, or `triton` can't run on the device.
        ImportError: `native` without the distribution `pagecast-native`.
        RuntimeError: Triton's kernels can't run in this process as it was prepared.
    """
    if name not in KERNELS:
        raise ValueError(f"kernels={name!r} is none of {', '.join(KERNELS)}")
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads} is below 1")
    if name == "native":
        return cast("Kernels", import_module("worker.plan.native").NativeKernels(num_threads=num_threads))
    if name == "triton":
        return cast("DeviceKernels", import_module("worker.plan.triton_launchers").triton_kernels(device))
    return cast("Kernels", import_module("worker.plan.interpreter").InterpreterKernels(name))
