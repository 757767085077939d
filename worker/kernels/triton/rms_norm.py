"""RMSNorm in Triton."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.rows import FLOATS, WIDTHS, check_rows, check_shape, compile_case, row_block
from worker.kernels.triton.targets import Target


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, eps, x_stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row; see `rms_norm`."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        x = tl.load(x_ptr + row * x_stride + start + lane, mask=start + lane < WIDTH, other=0.0)
        squares += x * x
    scale = 1.0 / tl.sqrt(tl.sum(squares) / WIDTH + eps)
    for start in tl.static_range(0, WIDTH, BLOCK):
        live = start + lane < WIDTH
        x = tl.load(x_ptr + row * x_stride + start + lane, mask=live, other=0.0)
        weight = tl.load(weight_ptr + start + lane, mask=live, other=0.0).to(tl.float32)
        out = (x * scale * weight).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * out_stride + start + lane, out, mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Scales each row by the inverse root of its mean square: `out = x / sqrt(mean(x^2) + eps) * weight`.

    One program per row, squares added in one fixed order, so a row's bits depend on the row alone. Moves
    `T * hidden * (4 + bytes of out)` bytes; the second read of a row comes from the cache.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), arXiv:1910.07467.

    Args:
        x: [T, hidden] float32, each row dense.
        weight: [hidden], any float dtype.
        eps: Added to the mean square, in float32.
        out: [T, hidden] float32, float16 or bfloat16, each row dense; may be `x`. None: a new one, float32.

    Returns:
        `out`.

    Raises:
        ValueError: A shape or a stride is wrong.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    check_rows(rms_norm_kernel, x=x, weight=weight, out=out)
    check_shape("weight", weight, (x.shape[1],))
    check_shape("out", out, tuple(x.shape))
    if len(x):
        rms_norm_kernel[(len(x),)](x, weight, out, eps, x.stride(0), out.stride(0), **row_block(x.shape[1]))
    return out


def compile_cases(target: Target) -> list[CompileCase]:
    """Every width and dtype; of the first model all dtypes are named."""
    return [
        compile_case(
            "rms_norm",
            f"{model} {out}",
            target,
            rms_norm_kernel,
            pointers={"x_ptr": torch.float32, "weight_ptr": torch.float32, "out_ptr": out},
            constants=row_block(hidden),
            scalars={"eps": "fp32"},
            divisible=("x_stride", "out_stride"),
            is_named=hidden == 2048 and out == torch.bfloat16,
        )
        for model, (hidden, _) in WIDTHS.items()
        for out in FLOATS
    ]
