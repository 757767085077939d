"""A product as the report wants it: wide loads, the matrix instruction that is named, nothing spilled."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import triton
import triton.language as tl

from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.targets import Target

MATRIX = {
    "sm_80": "mma.sync.aligned.m16n8k16",
    "sm_90": "wgmma.mma_async.sync.aligned.m64n64k16",
    "sm_100": "tcgen05.mma",
    "gfx942": "v_mfma_f32_32x32x8",
}


@triton.jit
def product_kernel(
    x_ptr, w_ptr, row_ptr, out_ptr, x_stride, w_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = x[row:] @ w.T; where the weights of a row of programs start is read from memory."""
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([M, N], tl.float32)
    w_row = w_ptr + tl.load(row_ptr + tl.program_id(0)).to(tl.int64) * w_stride
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_ptr + m[:, None] * x_stride + k[None, :] + start)
        w = tl.load(w_row + n[None, :] * w_stride + k[:, None] + start)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc, mask=(m < M - 1)[:, None])


def case(
    target: Target,
    label: str,
    *,
    matrix: str,
    dtype: str = "bf16",
    sizes: tuple[int, int, int] = (64, 64, 64),
    divisible: frozenset[str] = frozenset({"x_ptr", "w_ptr", "row_ptr", "out_ptr", "x_stride", "w_stride"}),
    precision: str = "ieee",
    num_stages: int = 3,
    is_named: bool = True,
) -> CompileCase:
    m, n, block_k = sizes
    return CompileCase(
        op="product",
        label=label,
        target=target,
        kernel=product_kernel,
        signature={
            **dict.fromkeys(("x_ptr", "w_ptr"), f"*{dtype}"),
            "row_ptr": "*i32",
            "out_ptr": "*fp32",
            **dict.fromkeys(("x_stride", "w_stride"), "i32"),
        },
        constants={"M": m, "N": n, "K": 1024, "BLOCK_K": block_k, "PRECISION": precision},
        divisible=divisible,
        num_warps=4,
        num_stages=num_stages,
        is_named=is_named,
        wide=frozenset({"w_ptr"}),
        matrix=matrix,
    )


def compile_cases(target: Target) -> list[CompileCase]:
    return [
        case(target, "bfloat16", matrix=MATRIX[target.name]),
        case(target, "float16", matrix=MATRIX[target.name], dtype="fp16", is_named=False),
    ]
