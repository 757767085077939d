"""SwiGLU in Triton."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.rows import ELEMENTS, FLOATS, WIDTHS, check_rows, check_shape, compile_case
from worker.kernels.triton.targets import Target


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_stride,
    up_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and block of columns; see `swiglu`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=live, other=0.0).to(tl.float32)
    out = gate / (tl.exp(-gate) + 1.0) * up
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), mask=live)


def swiglu(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Gates one projection by the other: `out = gate / (1 + exp(-gate)) * up`, in float32.

    Moves `T * intermediate * (bytes of gate, up and out)` bytes.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), arXiv:2002.05202.

    Args:
        gate: [T, intermediate], any float dtype, each row dense.
        up: As `gate`.
        out: [T, intermediate], any float dtype, each row dense. None: a new one, float32.

    Returns:
        `out`.

    Raises:
        ValueError: A shape or a stride is wrong.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    out = gate.new_empty(gate.shape, dtype=torch.float32) if out is None else out
    check_rows(swiglu_kernel, gate=gate, up=up, out=out)
    check_shape("up", up, tuple(gate.shape))
    check_shape("out", out, tuple(gate.shape))
    num_rows, width = gate.shape
    if num_rows:
        swiglu_kernel[(num_rows, triton.cdiv(width, ELEMENTS))](
            gate,
            up,
            out,
            gate.stride(0),
            up.stride(0),
            out.stride(0),
            WIDTH=width,
            BLOCK=ELEMENTS,
            num_warps=4,
        )
    return out


def compile_cases(target: Target) -> list[CompileCase]:
    """Both models and every dtype of the result."""
    return [
        compile_case(
            "swiglu",
            f"{model} {out}",
            target,
            swiglu_kernel,
            pointers={"gate_ptr": torch.float32, "up_ptr": torch.float32, "out_ptr": out},
            constants={"WIDTH": intermediate, "BLOCK": ELEMENTS, "num_warps": 4},
            divisible=("gate_stride", "up_stride", "out_stride"),
            is_named=intermediate == 5632 and out == torch.bfloat16,
        )
        for model, (_, intermediate) in WIDTHS.items()
        for out in FLOATS
    ]
