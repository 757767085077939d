"""Gate and up projection with SwiGLU in Triton: kernel and launcher."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.batch import TokenClass
from worker.kernels.quantised import QuantisedMatrix
from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.configs import LinearConfig
from worker.kernels.triton.product import KINDS, check_rows, make_product
from worker.kernels.triton.product_cases import product_cases
from worker.kernels.triton.targets import Target
from worker.kernels.triton.tiles import multiply, offsets_of_tokens

SHAPES = ((2 * 5632, 2048), (2 * 14336, 4096), (2 * 1536, 576))
"""Stacks of TinyLlama-1.1B and of Llama-3-8B, and one whose K is no whole number of blocks."""


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def linear_swiglu_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    scales_ptr,
    mins_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    num_blocks,
    x_stride,
    w_stride,
    pair_stride,
    out_stride,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_TILES: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One program per (tiles of tokens, tile of outputs); see `linear_swiglu`."""
    first_token = tl.program_id(0) * (BLOCK_M * ROW_TILES)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_offsets = offsets_of_tokens(first_token, x_stride, num_tokens, BLOCK_M, ROW_TILES)
    # Outputs beyond the last one read its weights again and are not stored.
    gate = tl.minimum(output, num_outputs - 1).to(tl.int64)
    up = gate + num_outputs
    sums = multiply(
        *(x_ptr, w_ptr, scales_ptr, mins_ptr, token_offsets),
        *((gate * w_stride, up * w_stride), (gate * pair_stride, up * pair_stride)),
        *(0, num_blocks, num_inputs, 2, KIND, COMPUTE, BLOCK_M, BLOCK_N, BLOCK_K, ROW_TILES, EVEN_K),
    )
    for tile in tl.static_range(ROW_TILES):
        gated = sums[tile] / (1.0 + tl.exp(-sums[tile])) * sums[ROW_TILES + tile]
        token = first_token + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        pointers = out_ptr + token.to(tl.int64)[None, :] * out_stride + output[:, None]
        tl.store(pointers, gated, mask=(token < num_tokens)[None, :] & (output < num_outputs)[:, None])


def linear_swiglu(
    x: Tensor,
    gate_up: Tensor | QuantisedMatrix,
    *,
    token_class: TokenClass = TokenClass.DECODE,
    compute: torch.dtype | None = None,
    config: LinearConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Projects by two stacked weights and gates: `out = silu(x @ gate.T) * (x @ up.T)`.

    The products are those of `linear` with one plane; gating is done in float32 on their sums, which never
    reach memory.

    Moves the weights once for every 64 tokens of decode class, once for every tile of tokens of prefill class
    (from L2 where programs of all tiles run side by side), x once per tile of outputs, and out once.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), arXiv:2002.05202.

    Args:
        x: [T, K] float32, float16 or bfloat16, rows dense.
        gate_up: [2 * intermediate, K], as the weight of `linear`; the first half gates.
        token_class: Of all tokens.
        compute: As of `linear`.
        config: In place of the table's; its splits are not used.
        out: [T, intermediate] float32, float16 or bfloat16, rows dense.

    Returns:
        `out`, or a new [T, intermediate] float32.

    Raises:
        ValueError: Arguments don't fit together; the message names them. Nothing is written.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    if gate_up.shape[0] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[0]} rows, which are no two halves")
    product = make_product(
        linear_swiglu_kernel, x, gate_up, token_class=token_class, compute=compute, config=config
    )
    num_tokens, num_outputs = x.shape[0], gate_up.shape[0] // 2
    if out is None:
        out = x.new_empty(num_tokens, num_outputs, dtype=torch.float32)
    if out.dtype not in KINDS or out.shape != (num_tokens, num_outputs):
        raise ValueError(f"out is {list(out.shape)} {out.dtype}: a float [{num_tokens}, {num_outputs}] is")
    check_rows(out, x)
    if num_tokens:
        grid = (
            triton.cdiv(num_tokens, product.tokens_of_program),
            triton.cdiv(num_outputs, product.config.block_n),
        )
        linear_swiglu_kernel[grid](
            product.x,
            *product.weight_arguments,
            out,
            num_tokens,
            num_outputs,
            product.num_inputs,
            product.num_blocks,
            product.x.stride(0),
            *product.weight_strides,
            out.stride(0),
            **product.constants,
            num_warps=product.config.num_warps,
            num_stages=product.config.num_stages,
        )
    return out


def compile_cases(target: Target) -> list[CompileCase]:
    """What of this module is compiled for a target, to be looked at."""
    return product_cases("linear_swiglu", linear_swiglu_kernel, target, SHAPES)
