"""What launchers of row kernels share: checks, sizes of blocks, and compile cases. Knows no kernel."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.targets import Target

MAX_BLOCK = 16384
"""Widest row that a program holds in registers: 32 floats a thread at 16 warps. Wider ones take a loop."""
ELEMENTS = 1024
"""Elements of an elementwise program: two 16-byte loads of float32 a thread at 4 warps."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What values may be stored in."""
WIDTHS = {"TinyLlama-1.1B": (2048, 5632), "Llama-3-8B": (4096, 14336)}
"""Hidden and intermediate sizes that kernels are compiled and checked for."""
_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def check_rows(kernel: Any, **values: Tensor) -> None:
    """Checks what a launch is given.

    Args:
        kernel: What will be launched.
        values: Tensors by argument; the last dimension of each must be dense.

    Raises:
        ValueError: A last dimension is not dense; the message names the argument.
        RuntimeError: A tensor is on the CPU and the kernel is compiled for a GPU.
    """
    for name, value in values.items():
        if value.shape[-1] > 1 and value.stride(-1) != 1:
            raise ValueError(f"{name}: rows must be dense, strides are {value.stride()}")
        if value.device.type == "cpu" and not isinstance(kernel, InterpretedFunction):
            raise RuntimeError(
                f"{name} is a CPU tensor: prepare_triton() says where they must be, before triton is imported"
            )


def check_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError, naming the argument, where a tensor has another shape."""
    if value.shape != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, {shape} is wanted")


def planes_of(y: Tensor) -> tuple[int, int]:
    """Number of planes of a value and the stride between them; a value [T, W] is one plane."""
    return (y.shape[0], y.stride(0)) if y.dim() == 3 else (1, 0)


def row_block(width: int) -> dict[str, int]:
    """Constants and warps of a kernel whose program covers one row of `width`, by keyword of the launch."""
    block = min(triton.next_power_of_2(width), MAX_BLOCK)
    return {"WIDTH": width, "BLOCK": block, "num_warps": max(1, min(16, block // 256))}


def compile_case(
    op: str,
    label: str,
    target: Target,
    kernel: Any,
    *,
    pointers: Mapping[str, torch.dtype | str],
    constants: Mapping[str, Any],
    scalars: Mapping[str, str] | None = None,
    divisible: Iterable[str] = (),
    is_named: bool,
) -> CompileCase:
    """A case from what a launch passes.

    Args:
        op: Module of the kernel.
        label: Tells the op's cases apart.
        target: What for.
        kernel: Under `triton.jit`.
        pointers: What each pointer points to; all are aligned to 16 bytes.
        constants: As the launcher passes them, `num_warps` included.
        scalars: Type of each argument that is neither pointer nor constant nor int32.
        divisible: Integers that are multiples of 16, strides.
        is_named: Whether the case is compiled in every run.
    """
    sizes = dict(constants)
    num_warps = sizes.pop("num_warps")
    kinds = dict(scalars or {})
    for name, kind in pointers.items():
        kinds[name] = "*" + (kind if isinstance(kind, str) else _TYPES[kind])
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names if name not in sizes}
    return CompileCase(
        op=op,
        label=label,
        target=target,
        kernel=kernel,
        signature=signature,
        constants=sizes,
        divisible=frozenset(pointers) | frozenset(divisible),
        num_warps=num_warps,
        num_stages=1,
        is_named=is_named,
    )
