"""Matrix product with a weight, plain or quantised, in Triton: kernel and launcher."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.batch import TokenClass
from worker.kernels.quantised import QuantisedMatrix
from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.configs import LinearConfig
from worker.kernels.triton.product import make_product
from worker.kernels.triton.product_cases import product_cases
from worker.kernels.triton.targets import Target
from worker.kernels.triton.tiles import multiply, offsets_of_tokens


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    scales_ptr,
    mins_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    blocks_per_split,
    x_stride,
    w_stride,
    pair_stride,
    plane_stride,
    out_stride,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_TILES: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One program per (tiles of tokens, tile of outputs, part of K); see `linear`."""
    first_token = tl.program_id(0) * (BLOCK_M * ROW_TILES)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    token_offsets = offsets_of_tokens(first_token, x_stride, num_tokens, BLOCK_M, ROW_TILES)
    # Outputs beyond the last one read its weights again and are not stored.
    row = tl.minimum(output, num_outputs - 1).to(tl.int64)
    sums = multiply(
        *(x_ptr, w_ptr, scales_ptr, mins_ptr, token_offsets, (row * w_stride,), (row * pair_stride,)),
        *(split * blocks_per_split, (split + 1) * blocks_per_split, num_inputs, 1, KIND, COMPUTE),
        *(BLOCK_M, BLOCK_N, BLOCK_K, ROW_TILES, EVEN_K),
    )
    out_ptr += split.to(tl.int64) * plane_stride
    for tile in tl.static_range(ROW_TILES):
        token = first_token + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        pointers = out_ptr + token.to(tl.int64)[None, :] * out_stride + output[:, None]
        tl.store(pointers, sums[tile], mask=(token < num_tokens)[None, :] & (output < num_outputs)[:, None])


def linear(
    x: Tensor,
    weight: Tensor | QuantisedMatrix,
    *,
    token_class: TokenClass = TokenClass.DECODE,
    compute: torch.dtype | None = None,
    config: LinearConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies rows by a weight: `out = x @ weight.T`, or sums of parts of K as planes.

    x and dequantised weights are rounded to the compute dtype: a plain weight's own, else `compute`; products
    are added in float32, blocks of K in ascending order. All rows of a class are cut and added alike, so a
    row's bits depend on that row, the weight, the class and the number of planes alone.

    Moves the weight once for every 64 tokens of decode class, once for every tile of tokens of prefill class
    (from L2 where programs of all tiles run side by side), x once per tile of outputs, and
    `planes * T * N * 4` bytes of out.

    Source: products split along K, Osama et al., "Stream-K" (2023), arXiv:2301.03598, here with a split that
    depends on the weight alone.

    Args:
        x: [T, K] float32, float16 or bfloat16, rows dense.
        weight: [N, K] float32, float16 or bfloat16, rows dense; or quantised.
        token_class: Of all tokens.
        compute: For quantised weights: bfloat16 (default on a GPU), float16 or float32 (default under the
            interpreter, which has no bfloat16).
        config: In place of the table's.
        out: [T, N] float32, or [planes, T, N], rows dense; planes is the config's number of splits. Whoever
            reads planes adds them in ascending order.

    Returns:
        `out`, or a new [T, N] float32.

    Raises:
        ValueError: Arguments don't fit together; the message names them. Nothing is written.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    product = make_product(linear_kernel, x, weight, token_class=token_class, compute=compute, config=config)
    num_tokens, num_outputs = x.shape[0], product.num_outputs
    if out is None:
        out = x.new_empty(num_tokens, num_outputs, dtype=torch.float32)
    splits = product.num_planes(out)
    if num_tokens:
        grid = (
            triton.cdiv(num_tokens, product.tokens_of_program),
            triton.cdiv(num_outputs, product.config.block_n),
            splits,
        )
        linear_kernel[grid](
            product.x,
            *product.weight_arguments,
            out,
            num_tokens,
            num_outputs,
            product.num_inputs,
            product.num_blocks // splits,
            product.x.stride(0),
            *product.weight_strides,
            out.stride(0) if out.dim() == 3 else 0,
            out.stride(-2),
            **product.constants,
            num_warps=product.config.num_warps,
            num_stages=product.config.num_stages,
        )
    return out


SHAPES = (
    *((2560, 2048), (2048, 2048), (2048, 5632), (32000, 2048)),
    *((6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096)),
    (960, 576),
)
"""Weights of TinyLlama-1.1B and of Llama-3-8B, and one whose K is no whole number of blocks."""


def compile_cases(target: Target) -> list[CompileCase]:
    """What of this module is compiled for a target, to be looked at."""
    return product_cases("linear", linear_kernel, target, SHAPES, out_type="*fp32")
