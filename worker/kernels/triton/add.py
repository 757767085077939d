"""Residual addition in Triton."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.rows import ELEMENTS, WIDTHS, check_rows, check_shape, compile_case, planes_of
from worker.kernels.triton.targets import Target


@triton.jit  # type: ignore[untyped-decorator]
def add_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    out_ptr,
    x_stride,
    y_plane_stride,
    y_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PLANES: tl.constexpr,
):
    """One program per row and block of columns; see `add`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    y = tl.load(y_ptr + row * y_stride + column, mask=live, other=0.0)
    for plane in tl.static_range(1, PLANES):
        plane_ptr = y_ptr + plane * y_plane_stride.to(tl.int64) + row * y_stride
        y += tl.load(plane_ptr + column, mask=live, other=0.0)
    x = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0)
    tl.store(out_ptr + row * out_stride + column, x + y, mask=live)


def add(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Adds: `out = x + y`; planes of y are added up in ascending order first.

    Moves `T * hidden * 4 * (2 + planes)` bytes.

    Args:
        x: [T, hidden] float32, each row dense.
        y: [T, hidden] or [planes, T, hidden] float32, each row dense.
        out: [T, hidden] float32, each row dense; may be `x`. None: a new one.

    Returns:
        `out`.

    Raises:
        ValueError: A shape or a stride is wrong.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    out = x.new_empty(x.shape) if out is None else out
    check_rows(add_kernel, x=x, y=y, out=out)
    check_shape("y", y[0] if y.dim() == 3 else y, tuple(x.shape))
    check_shape("out", out, tuple(x.shape))
    planes, plane_stride = planes_of(y)
    num_rows, width = x.shape
    if num_rows:
        add_kernel[(num_rows, triton.cdiv(width, ELEMENTS))](
            x,
            y,
            out,
            x.stride(0),
            plane_stride,
            y.stride(-2),
            out.stride(0),
            WIDTH=width,
            BLOCK=ELEMENTS,
            PLANES=planes,
            num_warps=4,
        )
    return out


def compile_cases(target: Target) -> list[CompileCase]:
    """Both models, one plane and four."""
    return [
        compile_case(
            "add",
            f"{model} planes={planes}",
            target,
            add_kernel,
            pointers=dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), torch.float32),
            constants={"WIDTH": hidden, "BLOCK": ELEMENTS, "PLANES": planes, "num_warps": 4},
            divisible=("x_stride", "y_stride", "y_plane_stride", "out_stride"),
            is_named=hidden == 2048 and planes == 4,
        )
        for model, (hidden, _) in WIDTHS.items()
        for planes in (1, 4)
    ]
