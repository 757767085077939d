"""Token embedding from a plain or quantised table in Triton: kernel and launcher."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.quantised import GROUP, PLANES, QUANT_KINDS, QuantisedMatrix
from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.product import (
    KINDS,
    check_rows,
    require_runnable,
    weight_arguments,
    weight_kind,
    weight_strides,
)
from worker.kernels.triton.targets import Target, target_of
from worker.kernels.triton.tiles import dequantise, load_groups

_COLUMNS = 1024
_THREADS = 128
"""Columns of a plain table that one program copies, and its threads: 8 for each, 16 bytes or more."""
_SPANS = 16
_SPAN_THREADS = 64
"""Spans of a quantised table that one program copies, and its threads: 16 bytes of words for each."""
_POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "q8_0": "*i16"}


@triton.jit  # type: ignore[untyped-decorator]
def embedding_kernel(  # type: ignore[no-untyped-def]
    w_ptr, token_ids_ptr, out_ptr, num_columns, w_stride, out_stride, BLOCK: tl.constexpr
):
    """One program per (token, block of columns) of a plain table; see `embedding`."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids_ptr + token).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_columns
    values = tl.load(w_ptr + row * w_stride + column, mask=mask)
    tl.store(out_ptr + token * out_stride + column, values.to(tl.float32), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def quantised_embedding_kernel(  # type: ignore[no-untyped-def]
    w_ptr,
    scales_ptr,
    mins_ptr,
    token_ids_ptr,
    out_ptr,
    num_columns,
    num_spans,
    w_stride,
    pair_stride,
    out_stride,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    SPANS: tl.constexpr,
):
    """One program per (token, spans of columns) of a quantised table; see `embedding`."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids_ptr + token).to(tl.int64)
    span = tl.program_id(1) * SPANS + tl.arange(0, SPANS)
    # Spans behind the last one are read as that one again and are not stored.
    inside = tl.minimum(span, num_spans - 1)
    word = tl.arange(0, 32)
    words = (tl.load(w_ptr + row * w_stride + inside[:, None] * 32 + word[None, :]),)
    pair_offset = row * pair_stride + inside * (PLANES // 2)
    scales = (load_groups(scales_ptr, pair_offset, 0, PLANES),)
    mins = ()
    if KIND == "q4_1":
        mins = (load_groups(mins_ptr, pair_offset, 0, PLANES),)  # type: ignore[assignment]
    for plane in tl.static_range(PLANES):
        values = dequantise(words, scales, mins, 0, plane, KIND, tl.float32)
        column = span[:, None] * (PLANES * 32) + plane * 32 + word[None, :]
        tl.store(out_ptr + token * out_stride + column, values, mask=column < num_columns)


def embedding(weight: Tensor | QuantisedMatrix, token_ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Looks up one row per token: `out[t] = weight[token_ids[t]]`, in float32.

    Moves `T * width` elements of the table and as many float32 to out.

    Source: the operator itself; quantised rows are dequantised as GGUF says.

    Args:
        weight: [vocab, width] float32, float16 or bfloat16 with dense rows, or quantised.
        token_ids: [T] int32, dense, each in [0, vocab).
        out: [T, width] float32, rows dense.

    Returns:
        `out`, or a new [T, width] float32.

    Raises:
        ValueError: Arguments don't fit together; the message names them. Nothing is written.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    require_runnable(embedding_kernel, token_ids)
    kind = weight_kind(weight)
    num_tokens, width = token_ids.shape[0], weight.shape[1]
    if token_ids.dtype != torch.int32 or token_ids.dim() != 1 or not token_ids.is_contiguous():
        raise ValueError(f"token_ids is {list(token_ids.shape)} {token_ids.dtype}: dense [T] int32 is")
    if weight.device != token_ids.device:
        raise ValueError(f"weight is on {weight.device}, token_ids on {token_ids.device}")
    if out is None:
        out = torch.empty(num_tokens, width, device=token_ids.device)
    if out.shape != (num_tokens, width) or out.dtype != torch.float32:
        raise ValueError(f"out is {list(out.shape)} {out.dtype}: [{num_tokens}, {width}] float32 is")
    check_rows(out, token_ids)
    if not num_tokens:
        return out
    if isinstance(weight, QuantisedMatrix):
        words, scales, mins = weight_arguments(weight)
        num_spans = words.shape[1] // GROUP
        quantised_embedding_kernel[num_tokens, triton.cdiv(num_spans, _SPANS)](
            *(words, scales, mins, token_ids, out, width, num_spans),
            *(*weight_strides(weight), out.stride(0)),
            KIND=kind,
            PLANES=PLANES[weight.kind],
            SPANS=_SPANS,
            num_warps=_SPAN_THREADS // target_of(token_ids.device).warp_size,
        )
    else:
        embedding_kernel[num_tokens, triton.cdiv(width, _COLUMNS)](
            *(weight, token_ids, out, width, weight.stride(0), out.stride(0)),
            BLOCK=_COLUMNS,
            num_warps=_THREADS // target_of(token_ids.device).warp_size,
        )
    return out


def compile_cases(target: Target) -> list[CompileCase]:
    """What of this module is compiled for a target, to be looked at."""
    cases = []
    for kind in (*KINDS.values(), *QUANT_KINDS):
        types = {"w_ptr": _POINTERS.get(kind, "*u16"), "token_ids_ptr": "*i32", "out_ptr": "*fp32"}
        constants: dict[str, Any] = {"BLOCK": _COLUMNS}
        kernel = embedding_kernel
        if kind in QUANT_KINDS:
            kernel = quantised_embedding_kernel
            constants = {"KIND": kind, "PLANES": 2 if kind == "q8_0" else 4, "SPANS": _SPANS}
            types |= {"scales_ptr": "*i32"}
            if kind == "q4_1":
                types |= {"mins_ptr": "*i32"}
            else:
                constants |= {"mins_ptr": None}
        signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
        cases.append(
            CompileCase(
                op="embedding",
                label=kind,
                target=target,
                kernel=kernel,
                signature=signature,
                constants=constants,
                divisible=frozenset(signature) - {"num_spans"},
                num_warps=(_SPAN_THREADS if kind in QUANT_KINDS else _THREADS) // target.warp_size,
                num_stages=1,
                is_named=kind in {"bfloat16", "q4_1"},
                wide=frozenset({"w_ptr"}),
            )
        )
    return cases
