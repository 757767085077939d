"""Residual addition and the RMSNorm that follows it, in Triton."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.rows import (
    FLOATS,
    WIDTHS,
    check_rows,
    check_shape,
    compile_case,
    planes_of,
    row_block,
)
from worker.kernels.triton.targets import Target


@triton.jit  # type: ignore[untyped-decorator]
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    eps,
    x_stride,
    y_plane_stride,
    y_stride,
    sum_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PLANES: tl.constexpr,
):
    """One program per row; see `add_rms_norm`."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        live = start + lane < WIDTH
        y = tl.load(y_ptr + row * y_stride + start + lane, mask=live, other=0.0)
        for plane in tl.static_range(1, PLANES):
            plane_ptr = y_ptr + plane * y_plane_stride.to(tl.int64) + row * y_stride
            y += tl.load(plane_ptr + start + lane, mask=live, other=0.0)
        total = tl.load(x_ptr + row * x_stride + start + lane, mask=live, other=0.0) + y
        tl.store(sum_ptr + row * sum_stride + start + lane, total, mask=live)
        squares += total * total
    scale = 1.0 / tl.sqrt(tl.sum(squares) / WIDTH + eps)
    for start in tl.static_range(0, WIDTH, BLOCK):
        live = start + lane < WIDTH
        # A row of one block is still in registers.
        if WIDTH > BLOCK:
            tl.debug_barrier()
            total = tl.load(sum_ptr + row * sum_stride + start + lane, mask=live, other=0.0)
        weight = tl.load(weight_ptr + start + lane, mask=live, other=0.0).to(tl.float32)
        out = (total * scale * weight).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * out_stride + start + lane, out, mask=live)


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Adds, and normalises the sum: `sum = x + y`, `normed = rms_norm(sum, weight, eps)`.

    Planes of y are added up in ascending order first. One program per row, so a row's bits depend on the row
    alone. Moves `T * hidden * (4 + 4 * planes + 4 + bytes of normed)` bytes.

    Args:
        x: [T, hidden] float32, each row dense.
        y: [T, hidden] or [planes, T, hidden] float32, each row dense.
        weight: [hidden], any float dtype.
        eps: Added to the mean square, in float32.
        out: Sum, float32, which may be `x`, and its norm, float32, float16 or bfloat16; each [T, hidden] with
            dense rows. None: new ones, float32.

    Returns:
        `out`.

    Raises:
        ValueError: A shape or a stride is wrong.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    if out is None:
        out = x.new_empty(x.shape), x.new_empty(x.shape)
    total, normed = out
    check_rows(add_rms_norm_kernel, x=x, y=y, weight=weight, sum=total, normed=normed)
    check_shape("weight", weight, (x.shape[1],))
    for name, value in (("y", y[0] if y.dim() == 3 else y), ("sum", total), ("normed", normed)):
        check_shape(name, value, tuple(x.shape))
    planes, plane_stride = planes_of(y)
    if len(x):
        add_rms_norm_kernel[(len(x),)](
            x,
            y,
            weight,
            total,
            normed,
            eps,
            x.stride(0),
            plane_stride,
            y.stride(-2),
            total.stride(0),
            normed.stride(0),
            PLANES=planes,
            **row_block(x.shape[1]),
        )
    return total, normed


def compile_cases(target: Target) -> list[CompileCase]:
    """Every width and dtype with one plane and with four."""
    return [
        compile_case(
            "add_rms_norm",
            f"{model} {out} planes={planes}",
            target,
            add_rms_norm_kernel,
            pointers={
                **dict.fromkeys(("x_ptr", "y_ptr", "weight_ptr", "sum_ptr"), torch.float32),
                "out_ptr": out,
            },
            constants=row_block(hidden) | {"PLANES": planes},
            scalars={"eps": "fp32"},
            divisible=("x_stride", "y_stride", "y_plane_stride", "sum_stride", "out_stride"),
            is_named=hidden == 4096 and planes == 4 and out == torch.bfloat16,
        )
        for model, (hidden, _) in WIDTHS.items()
        for out in FLOATS
        for planes in (1, 4)
    ]
