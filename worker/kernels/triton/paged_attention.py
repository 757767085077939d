"""Attention over paged KV in Triton: the launcher and the size of its workspace.

Knows shapes and configs only; the kernels are in `attention_spans` and `attention_merge`, how a call is cut
in `attention_cut`.
"""

import math

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from worker.batch import TokenClass
from worker.kernels.triton.attention_compile import attention_cases
from worker.kernels.triton.attention_cut import KV_DTYPES, attention_cut, merge_constants, span_constants
from worker.kernels.triton.attention_merge import merge_spans_kernel
from worker.kernels.triton.attention_spans import attend_spans_kernel
from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.configs import AttentionConfig, attention_config
from worker.kernels.triton.targets import Target, target_of

_LOG2_E = math.log2(math.e)


def workspace_floats(
    target: Target,
    token_class: TokenClass,
    *,
    num_tokens: int,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    kv_dtype: str,
    max_context_tokens: int,
) -> int:
    """Floats that a call's `workspace` must have. More tokens may need less: take the most of all buckets.

    Args:
        target: Where it runs.
        token_class: Of the tokens.
        num_tokens: T, padding included.
        num_rows: R, padding included.
        num_heads: Of q.
        num_kv_heads: Of the cache.
        head_size: Width of a head.
        kv_dtype: Of the cache, as `attention_config` calls it.
        max_context_tokens: As the call is given it.
    """
    cut = attention_cut(
        attention_config(target, token_class, head_size=head_size, kv_dtype=kv_dtype),
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        max_context_tokens=max_context_tokens,
        num_sms=target.num_sms,
    )
    return cut.workspace_floats(num_tokens=num_tokens, num_heads=num_heads, head_size=head_size)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    query_start: Tensor,
    scale: float,
    *,
    token_class: TokenClass = TokenClass.DECODE,
    window: int = 0,
    soft_cap: float = 0.0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    max_context_tokens: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    config: AttentionConfig | None = None,
    num_programs: int | None = None,
) -> Tensor:
    """Causal attention of each row's new tokens over its paged context, as the reference computes it.

    Query i of a row with n new tokens is at position `p = context_len - n + i` and attends `0..p`, with a
    window its last `window` tokens: `out = sum_t softmax_t(cap(scale * q . k_t)) v_t`, `cap(s) = soft_cap *
    tanh(s / soft_cap)` if there is one. The context is cut into spans of fixed length. Each gives an online
    softmax over blocks of `block_n` tokens, and spans are folded in ascending order. What a query does not
    attend leaves its sums as they are (factors exp(0), weights 0), so its bits depend on its own context,
    class, config and `max_context_tokens` alone. q and the weights are rounded to the cache's dtype (float8:
    float16) before the products; sums are float32, and float32 products never TF32.

    Moves, for each tile of queries and KV head, 2 * attended tokens * head_size elements of KV once for all
    heads of the group, and q and out once; several programs a tile also write and read
    `live spans * (head_size + 2) * 4` bytes per token and head.

    Source: the online softmax of Dao, "FlashAttention-2" (2023), arXiv:2307.08691, its split over the context
    of Dao et al., "Flash-Decoding" (2023), the block tables of Kwon et al., "PagedAttention" (2023),
    arXiv:2309.06180.

    Args:
        q: [T, num_heads * head_size] of any float dtype, each row dense.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size] float32, float16, bfloat16 or
            float8_e4m3fn, any strides, but heads of float8 must be dense; loads are 16 bytes wide where they
            are.
        value_cache: As `key_cache`, of strides of its own. Slots that nobody attends may hold anything.
        block_table: [R, max_blocks] int32, logical to physical block; only blocks that are attended are
            looked up.
        context_len: [R] int32, tokens that a row's last new token attends, itself included.
        query_start: [R + 1] int32, first token of each row, then the end of the last. Of a row without tokens
            nothing else is read; tokens beyond the end are left as they are in `out`.
        scale: Factor on the dot products, above 0.
        token_class: Of all tokens; picks the config.
        window: Tokens that a query attends at most, itself included; 0 for all.
        soft_cap: Bound of the scores; 0 for none.
        key_scale: [num_kv_heads] float32, factor on stored keys, or None.
        value_scale: As `key_scale`, of values.
        max_context_tokens: Longest context of any call that shall give the same bits; default: what a row of
            `block_table` covers.
        workspace: float32 of at least `workspace_floats(…)`; default: allocated.
        out: [T, num_heads * head_size] of any float dtype, each row dense; default: float32, allocated.
        config: Instead of the one of device and class.
        num_programs: Programs that share a tile's spans, instead of as many as fill the device.

    Returns:
        `out`.

    Raises:
        ValueError: An argument is out of its range or of another shape, stride or dtype; names it.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    if not q.is_cuda and not isinstance(attend_spans_kernel, InterpretedFunction):
        raise RuntimeError(
            "CPU tensors: prepare_triton() says where they must be, before anything imports triton"
        )
    if out is None:
        out = q.new_empty(q.shape, dtype=torch.float32)
    kv_dtype = str(key_cache.dtype).removeprefix("torch.")
    _check(q, key_cache, value_cache, block_table, context_len, query_start, out)
    if not 0.0 < scale < math.inf or not 0.0 <= soft_cap < math.inf or window < 0:
        raise ValueError(f"{scale=}, {soft_cap=} or {window=} is out of range")
    num_tokens, width = q.shape
    num_rows = context_len.shape[0]
    _, block_size, num_kv_heads, head_size = key_cache.shape
    num_heads = width // head_size
    for name, scales in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scales is not None and (scales.dtype != torch.float32 or scales.shape != (num_kv_heads,)):
            raise ValueError(f"{name} is {scales.dtype} {list(scales.shape)}, not float32 [{num_kv_heads}]")
    if not num_tokens or not num_rows:
        return out
    target = target_of(q.device)
    config = config or attention_config(target, token_class, head_size=head_size, kv_dtype=kv_dtype)
    cut = attention_cut(
        config,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        max_context_tokens=max_context_tokens or block_table.shape[1] * block_size,
        num_sms=target.num_sms,
        num_programs=num_programs,
    )
    workspace = _workspace(
        workspace, q, cut.workspace_floats(num_tokens=num_tokens, num_heads=num_heads, head_size=head_size)
    )
    constants = span_constants(
        config,
        cut,
        target,
        block_size=block_size,
        head_size=head_size,
        group=num_heads // num_kv_heads,
        kv_dtype=kv_dtype,
        soft_cap=soft_cap > 0.0,
        window=window > 0,
    )
    # Bits of float8 that are moved into float16 are 1/256 of the value.
    moved = 256.0 if constants["PARTS"] == 2 else 1.0
    if constants["PARTS"] == 2:
        key_cache, value_cache = _words("key_cache", key_cache), _words("value_cache", value_cache)
    score_factor = scale * moved * _LOG2_E
    cap_factor, factor = (
        (2.0 * score_factor / soft_cap, soft_cap * _LOG2_E) if soft_cap else (1.0, score_factor)
    )
    attend_spans_kernel[(cut.num_tiles, num_kv_heads, cut.num_programs)](
        q,
        out,
        workspace,
        key_cache,
        value_cache,
        key_scale,
        value_scale,
        block_table,
        context_len,
        query_start,
        num_tokens,
        num_rows,
        cut.num_planes,
        num_heads,
        window,
        cap_factor,
        factor,
        moved,
        q.stride(0),
        out.stride(0),
        block_table.stride(0),
        *key_cache.stride(),
        *value_cache.stride(),
        **constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if cut.num_programs > 1:
        merge_spans_kernel[(num_tokens, num_heads)](
            workspace,
            out,
            value_scale,
            context_len,
            query_start,
            num_tokens,
            num_rows,
            cut.num_planes,
            num_heads,
            window,
            moved,
            out.stride(0),
            **merge_constants(constants),
            num_warps=1,
        )
    return out


def compile_cases(target: Target) -> list[CompileCase]:
    """What of this operation is compiled for a target, to be looked at."""
    return attention_cases(target)


def _check(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    query_start: Tensor,
    out: Tensor,
) -> None:
    """Raises ValueError for shapes, strides and dtypes that the kernels would misread."""
    num_kv_heads, head_size = key_cache.shape[2:]
    kv_dtype = str(key_cache.dtype).removeprefix("torch.")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"key_cache of {kv_dtype} is none of {', '.join(KV_DTYPES)}")
    if value_cache.shape != key_cache.shape or value_cache.dtype != key_cache.dtype:
        raise ValueError(f"value_cache is {value_cache.dtype} {list(value_cache.shape)}, unlike key_cache")
    if not q.shape[1] or q.shape[1] % (num_kv_heads * head_size):
        raise ValueError(f"q has width {q.shape[1]}: no multiple of {num_kv_heads} heads of {head_size}")
    if out.shape != q.shape:
        raise ValueError(f"out is {list(out.shape)}, q {list(q.shape)}")
    for name, matrix in (("q", q), ("out", out), ("block_table", block_table)):
        if matrix.shape[1] > 1 and matrix.stride(1) != 1:
            raise ValueError(f"rows of {name} must be dense: strides {matrix.stride()}")
    num_rows = context_len.shape[0]
    if block_table.shape[0] != num_rows or query_start.shape[0] != num_rows + 1:
        raise ValueError(
            f"context_len has {num_rows} rows, block_table {block_table.shape[0]}, "
            f"query_start {query_start.shape[0] - 1}"
        )
    for name, values in (
        ("block_table", block_table),
        ("context_len", context_len),
        ("query_start", query_start),
    ):
        if values.dtype != torch.int32:
            raise ValueError(f"{name} is {values.dtype}, not int32")


def _words(name: str, cache: Tensor) -> Tensor:
    """A cache of float8 as words of two elements of a head; raises ValueError where it is none of such."""
    if cache.stride(3) != 1 or any(size % 2 for size in (*cache.stride()[:3], cache.shape[3])):
        raise ValueError(f"{name} of float8 must have dense heads of even size: strides {cache.stride()}")
    return cache.view(torch.uint16)


def _workspace(workspace: Tensor | None, q: Tensor, num_floats: int) -> Tensor:
    """What spans are left in; of one program nothing is."""
    if workspace is None:
        return q.new_empty(num_floats, dtype=torch.float32)
    if workspace.dtype != torch.float32 or workspace.numel() < num_floats or not workspace.is_contiguous():
        raise ValueError(
            f"workspace has {workspace.numel()} elements of {workspace.dtype}, not {num_floats} dense float32"
        )
    return workspace
