"""Runs a program with one native call. Knows what operands are to `pagecast_native`, nothing of a step."""

from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

import numpy as np
import pagecast_native
import torch
from torch import Tensor

from worker.kv.storage import KV_DTYPES, KvStorage
from worker.model.config import LlamaConfig
from worker.model.weights.store import Activations, WeightStore
from worker.plan.executor import KernelsUnsuitable
from worker.plan.graph import StepInputs
from worker.plan.native_draws import NativeDraws
from worker.plan.program import Constant, Input, KvLayer, Launch, Program, Value

_PACKED = {"embedding": 0, "linear": 1, "linear_swiglu": 1}
"""Which argument is a matrix in panels; other constants are plain."""
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
"""What products may be made of."""
_ARENA_ALIGNMENT = 64
_KvName = Literal["float32", "float16", "bfloat16", "int8"]
_KV_NAMES: Final[dict[torch.dtype, _KvName]] = {KV_DTYPES[name]: name for name in get_args(_KvName)}
"""What a pool may hold, as `pagecast_native.KvLayer` names it."""
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
        activations: One of `ACTIVATIONS`.

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
        activations: Activations = "float32",
    ) -> None:
        self._store = store
        self._kv = kv
        self._team = team
        self._kernel_set = kernel_set
        # Fixed for the program's life: launches hold addresses.
        self._inputs = {name: tensor.numpy() for name, tensor in inputs._asdict().items()}
        self.arena = _aligned_zeros(program.arena_bytes // 4)
        self._arena = self.arena.numpy()
        output = program.output
        self.output: Tensor = self.arena.as_strided(
            (program.capacity.num_rows, output.width), (output.row_stride, 1), output.offset
        )
        # Bytes, since NumPy has no bfloat16.
        self._pool = kv.data.view(-1).view(torch.uint8).numpy()
        self._program = pagecast_native.Program(
            team,
            max_tokens=program.capacity.num_tokens,
            max_rows=program.capacity.num_rows,
            kernel_set=kernel_set,
            activations=activations,
        )
        for launch in program.launches:
            self._add(launch)

    @property
    def launch_ns(self) -> list[int]:
        """Of the last run, the time of each launch, as its longest thread took it."""
        return self._program.launch_ns

    def run(self, num_tokens: int, num_rows: int, num_logits: int) -> int:
        """Runs every launch once over the live part of the inputs, without holding the interpreter's lock.

        Returns:
            Of its time, what was inside kernels, each as its longest thread took it, in ns.

        Raises:
            ValueError: A number is beyond the capacity.
        """
        return self._program.run(num_tokens, num_rows, num_logits)

    def token_draws(self, *, vocab_size: int) -> NativeDraws:
        """Draws in native code, by the threads that run the program and in the same call."""
        return NativeDraws(
            self._team,
            self._program,
            self.output.numpy(),
            vocab_size=vocab_size,
            kernel_set=self._kernel_set,
        )

    def _add(self, launch: Launch) -> None:
        packed = _PACKED.get(launch.operator)
        arguments = [
            self._packed(launch.operator, operand) if place == packed else self._operand(operand)
            for place, operand in enumerate((*launch.arguments, *launch.outputs))
        ]
        add = getattr(self._program, launch.operator, None)
        if add is None:
            raise KernelsUnsuitable(f"native kernels have no operator {launch.operator}")
        add(*arguments)

    def _packed(self, operator: str, operand: object) -> pagecast_native.PackedMatrix:
        if not isinstance(operand, Constant):
            raise KernelsUnsuitable(f"{operator}: its weight is {operand}, native kernels take a constant")
        # Panels of gate and up are read side by side.
        return self._store.packed(operand.parts, wants_one_format=operator == "linear_swiglu")

    def _operand(self, operand: object) -> Any:
        match operand:
            case Value():
                return pagecast_native.View(
                    self._arena, operand.offset, operand.row_stride, operand.width, operand.extent.value
                )
            case Input(name):
                return self._inputs[name]
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
            offset=int(view.storage_offset() - kv.data.storage_offset()) * kv.dtype.itemsize,
            num_blocks=kv.num_blocks,
            block_stride=view.stride(0) * kv.dtype.itemsize,
            head_stride=view.stride(1) * kv.dtype.itemsize,
            num_kv_heads=kv.num_kv_heads,
            head_size=kv.head_size,
            block_size=kv.block_size,
            dtype=_KV_NAMES[kv.dtype],
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
        thread_cpus: The CPU that each thread stays on, the caller's first; empty: they may move.
        kernel_set: One of `pagecast_native.kernel_sets()`; None: the machine's best.
        activations: What products are made of, one of `ACTIVATIONS`.

    Attributes:
        name: Kernel set, threads and activations.

    Raises:
        ValueError: There are no such activations, or not so many threads or CPUs.
    """

    def __init__(
        self,
        *,
        num_threads: int,
        thread_cpus: Sequence[int] = (),
        kernel_set: str | None = None,
        activations: Activations = "float32",
    ) -> None:
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations={activations!r} is none of {', '.join(ACTIVATIONS)}")
        self._kernel_set = kernel_set or pagecast_native.default_kernel_set()
        cpus = (thread_cpus,) if thread_cpus else ()
        self._team = pagecast_native.Team(num_threads, *cpus)
        self._activations = activations
        self.name = f"native/{self._kernel_set}/{num_threads}/{activations}"

    def check(self, config: LlamaConfig, kv: KvStorage) -> None:
        """Raises KernelsUnsuitable for a size that the kernels can't run, or another pool than theirs."""
        if reason := native_unsuitable(config, kv.block_size):
            raise KernelsUnsuitable(reason)
        if kv.data.device.type != "cpu":
            raise KernelsUnsuitable(f"the pool is on {kv.data.device}, native kernels need host memory")
        if kv.dtype not in _KV_NAMES or not kv.keys_across:
            order = "across" if kv.keys_across else "along"
            raise KernelsUnsuitable(
                f"the pool is {kv.dtype}, keys {order} their block; native kernels need"
                f" {', '.join(_KV_NAMES.values())}, across"
            )

    def executor(
        self, program: Program, inputs: StepInputs, store: WeightStore, kv: KvStorage
    ) -> NativeExecutor:
        """Binds a program to memory."""
        return NativeExecutor(
            program,
            inputs,
            store,
            kv,
            self._team,
            kernel_set=self._kernel_set,
            activations=self._activations,
        )
