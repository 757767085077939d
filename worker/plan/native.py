"""Runs a program with one native call. Knows what operands are to `pagecast_native`, nothing of a step."""

from typing import Any

import numpy as np
import pagecast_native
import torch
from torch import Tensor

from worker.kv.storage import KvStorage
from worker.model.config import LlamaConfig
from worker.model.weights.store import WeightStore
from worker.plan.executor import KernelsUnsuitable
from worker.plan.graph import StepInputs
from worker.plan.program import Constant, Input, KvLayer, Launch, Program, Value

_PACKED = {"embedding": 0, "linear": 1, "linear_swiglu": 1}
"""Which argument is a matrix in panels; other constants are plain."""
_ARENA_ALIGNMENT = 64
# What `pagecast_native.KvLayer` can describe.
_MAX_KV_HEADS = (1 << 16) - 1
_MAX_BLOCK_FLOATS = (1 << 31) - 1


def native_unsuitable(config: LlamaConfig, block_size: int) -> str | None:
    """Why native kernels can't run a model over blocks of `block_size` tokens; None: they can.

    Widths may be any, those of the residual stream, the MLP and the vocabulary.
    """
    lanes = pagecast_native.LANES
    for name, size in (("head_size", config.head_size), ("block_size", block_size)):
        if size % lanes:
            return f"{name}={size} is not a multiple of {lanes}"
    if config.head_size > pagecast_native.MAX_HEAD_SIZE:
        return f"head_size={config.head_size} is over {pagecast_native.MAX_HEAD_SIZE}"
    if config.num_kv_heads > _MAX_KV_HEADS:
        return f"num_kv_heads={config.num_kv_heads} is over {_MAX_KV_HEADS}"
    block_floats = 2 * config.num_layers * config.num_kv_heads * config.head_size * block_size
    if block_floats > _MAX_BLOCK_FLOATS:
        return (
            f"num_layers={config.num_layers}: a KV block has {block_floats} floats, over {_MAX_BLOCK_FLOATS}"
        )
    with np.errstate(over="ignore", under="ignore"):
        eps = np.float32(config.rms_norm_eps)
    if not 0 < eps < np.inf:
        return f"rms_norm_eps={config.rms_norm_eps} is {eps} in float32"
    return None


class NativeExecutor:
    """A program as one `pagecast_native.Program`.

    Args:
        program: What to run.
        inputs: Buffers at the program's capacity, in host memory.
        store: Weights; matrices are packed on first use.
        kv: Pool in host memory; written.
        team: Threads that share every launch.
        kernel_set: One of `pagecast_native.kernel_sets()`; None: the machine's best.

    Attributes:
        arena: [floats] float32, all results.
        output: [most logits, vocab] float32, a view of the arena.

    Raises:
        ValueError: An operand does not suit its operator; the message names the argument.
        KernelsUnsuitable: There is no native kernel for an operator.
    """

    def __init__(
        self,
        program: Program,
        inputs: StepInputs,
        store: WeightStore,
        kv: KvStorage,
        team: pagecast_native.Team,
        *,
        kernel_set: str | None = None,
    ) -> None:
        self._store = store
        self._kv = kv
        # Fixed for the program's life: launches hold addresses.
        self._inputs = {name: tensor.numpy() for name, tensor in inputs._asdict().items()}
        self.arena = _aligned_zeros(program.arena_bytes // 4)
        self._arena = self.arena.numpy()
        output = program.output
        self.output: Tensor = self.arena.as_strided(
            (program.capacity.num_rows, output.width), (output.row_stride, 1), output.offset
        )
        self._pool = kv.data.numpy().reshape(-1)
        self._native = pagecast_native.Program(
            team,
            max_tokens=program.capacity.num_tokens,
            max_rows=program.capacity.num_rows,
            kernel_set=kernel_set,
        )
        for launch in program.launches:
            self._add(launch)

    @property
    def launch_ns(self) -> list[int]:
        """Of the last run, the time of each launch, as its longest thread took it."""
        return self._native.launch_ns

    def run(self, num_tokens: int, num_rows: int, num_logits: int) -> int:
        """Runs every launch once over the live part of the inputs, without holding the interpreter's lock.

        Returns:
            Of its time, what was inside kernels, each as its longest thread took it, in ns.

        Raises:
            ValueError: A number is beyond the capacity.
        """
        return self._native.run(num_tokens, num_rows, num_logits)

    def _add(self, launch: Launch) -> None:
        packed = _PACKED.get(launch.operator)
        arguments = [
            self._operand(operand, is_packed=place == packed)
            for place, operand in enumerate((*launch.arguments, *launch.outputs))
        ]
        add = getattr(self._native, launch.operator, None)
        if add is None:
            raise KernelsUnsuitable(f"native kernels have no operator {launch.operator}")
        add(*arguments)

    def _operand(self, operand: object, *, is_packed: bool) -> Any:
        match operand:
            case Value():
                return pagecast_native.View(
                    self._arena, operand.offset, operand.row_stride, operand.width, operand.extent.value
                )
            case Input(name):
                return self._inputs[name]
            case Constant(parts) if is_packed:
                return self._store.packed(parts)
            case Constant(parts):
                return self._store.stacked(parts).numpy()
            case KvLayer(layer, is_key):
                return self._layer(layer, is_key=is_key)
            case _:
                return operand

    def _layer(self, layer: int, *, is_key: bool) -> pagecast_native.KvLayer:
        kv = self._kv
        view = kv.data[:, layer, 0 if is_key else 1]
        return pagecast_native.KvLayer(
            self._pool,
            offset=int(view.storage_offset() - kv.data.storage_offset()),
            num_blocks=kv.num_blocks,
            block_stride=view.stride(0),
            head_stride=view.stride(1),
            num_kv_heads=kv.num_kv_heads,
            head_size=kv.head_size,
            block_size=kv.block_size,
        )


def _aligned_zeros(num_floats: int) -> Tensor:
    """Zeros that start at a cache line, so that rows do; memory that nothing else refers to."""
    room = np.zeros(num_floats * 4 + _ARENA_ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ARENA_ALIGNMENT
    return torch.from_numpy(room[start : start + num_floats * 4].view(np.float32))


class NativeKernels:
    """Native kernels and the threads that run them.

    Args:
        num_threads: At least 1; the caller's own is one of them.
        kernel_set: One of `pagecast_native.kernel_sets()`; None: the machine's best.

    Attributes:
        name: Kernel set and threads.
    """

    def __init__(self, *, num_threads: int, kernel_set: str | None = None) -> None:
        self._kernel_set = kernel_set or pagecast_native.default_kernel_set()
        self._team = pagecast_native.Team(num_threads)
        self.name = f"native/{self._kernel_set}/{num_threads}"

    def check(self, config: LlamaConfig, kv: KvStorage) -> None:
        """Raises KernelsUnsuitable for a size that the kernels can't run, or another pool than theirs."""
        if reason := native_unsuitable(config, kv.block_size):
            raise KernelsUnsuitable(reason)
        if kv.data.device.type != "cpu":
            raise KernelsUnsuitable(f"the pool is on {kv.data.device}, native kernels need host memory")
        if kv.dtype != torch.float32 or not kv.keys_across:
            order = "across" if kv.keys_across else "along"
            raise KernelsUnsuitable(
                f"the pool is {kv.dtype}, keys {order} their block; native kernels need float32, across"
            )

    def executor(
        self, program: Program, inputs: StepInputs, store: WeightStore, kv: KvStorage
    ) -> NativeExecutor:
        """Binds a program to memory."""
        return NativeExecutor(program, inputs, store, kv, self._team, kernel_set=self._kernel_set)
