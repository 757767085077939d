"""Row selection in Triton."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.rows import ELEMENTS, FLOATS, WIDTHS, check_rows, check_shape, compile_case
from worker.kernels.triton.targets import Target


@triton.jit  # type: ignore[untyped-decorator]
def select_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, index_ptr, out_ptr, x_stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row of the result and block of columns; see `select_rows`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    source = tl.load(index_ptr + row).to(tl.int64)
    x = tl.load(x_ptr + source * x_stride + column, mask=live)
    tl.store(out_ptr + row * out_stride + column, x.to(out_ptr.dtype.element_ty), mask=live)


def select_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Keeps the rows that logits are wanted for: `out[l] = x[index[l]]`.

    Moves `L * hidden * (bytes of x and out)` bytes.

    Args:
        x: [T, hidden], any float dtype, each row dense.
        index: [L] int32, each in [0, T), which is not checked.
        out: [L, hidden], any float dtype, each row dense. None: a new one of x's dtype.

    Returns:
        `out`.

    Raises:
        ValueError: A shape or a stride is wrong.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    num_rows, width = len(index), x.shape[1]
    out = x.new_empty(num_rows, width) if out is None else out
    check_rows(select_rows_kernel, x=x, index=index, out=out)
    check_shape("out", out, (num_rows, width))
    if num_rows:
        select_rows_kernel[(num_rows, triton.cdiv(width, ELEMENTS))](
            x, index, out, x.stride(0), out.stride(0), WIDTH=width, BLOCK=ELEMENTS, num_warps=4
        )
    return out


def compile_cases(target: Target) -> list[CompileCase]:
    """Both models and every dtype."""
    return [
        compile_case(
            "select_rows",
            f"{model} {dtype}",
            target,
            select_rows_kernel,
            pointers={"x_ptr": dtype, "index_ptr": "i32", "out_ptr": dtype},
            constants={"WIDTH": hidden, "BLOCK": ELEMENTS, "num_warps": 4},
            divisible=("x_stride", "out_stride"),
            is_named=hidden == 2048 and dtype == torch.float32,
        )
        for model, (hidden, _) in WIDTHS.items()
        for dtype in FLOATS
    ]
