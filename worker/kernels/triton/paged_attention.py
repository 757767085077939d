"""Attention over paged KV in Triton: one kernel for prefill and decode rows, and its launcher."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

TILE_ROWS = 16
"""Least (query, head of the group) pairs of a tile: the smallest matrix product that `tl.dot` takes."""


@triton.jit  # type: ignore[untyped-decorator]
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    out_ptr,
    key_ptr,
    value_ptr,
    block_table_ptr,
    context_len_ptr,
    query_start_ptr,
    num_rows,
    scale,
    q_token_stride,
    out_token_stride,
    block_table_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    key_dim_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    value_dim_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per (query tile, KV head); see `paged_attention`."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)

    # Row r's tiles start at query_start[r] // TILE_QUERIES + r, which leaves room for each row's short tile:
    # the last row whose first tile is not beyond this one owns it.
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(query_start_ptr + middle) // TILE_QUERIES + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    row = low
    row_start = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - row_start
    context_len = tl.load(context_len_ptr + row)
    first_query = (tile - row_start // TILE_QUERIES - row) * TILE_QUERIES
    if first_query < num_queries:
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        n = tl.arange(0, BLOCK_N)
        query = first_query + m // GROUP
        head = kv_head * GROUP + m % GROUP
        live_m = (m < TILE_QUERIES * GROUP) & (query < num_queries)
        position = context_len - num_queries + query
        token = (row_start + query)[:, None]
        lane = head[:, None] * HEAD_SIZE + d[None, :]
        q_mask = live_m[:, None] & (d < HEAD_SIZE)[None, :]
        q = tl.load(q_ptr + token * q_token_stride + lane, mask=q_mask, other=0.0)

        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        last_query = tl.minimum(first_query + TILE_QUERIES, num_queries) - 1
        num_attended = context_len - num_queries + last_query + 1
        for block in range(tl.cdiv(num_attended, BLOCK_SIZE)):
            physical = tl.load(block_table_ptr + row * block_table_stride + block).to(tl.int64)
            # Keys as [dim, slot], the order that the product of scores wants and the pool keeps them in.
            key_offset = physical * key_block_stride + kv_head * key_head_stride
            key_offset = key_offset + n[None, :] * key_slot_stride + d[:, None] * key_dim_stride
            value_offset = physical * value_block_stride + kv_head * value_head_stride
            value_offset = value_offset + n[:, None] * value_slot_stride + d[None, :] * value_dim_stride
            slot_position = block * BLOCK_SIZE + n
            live_n = (n < BLOCK_SIZE) & (slot_position < num_attended)
            key_mask = (d < HEAD_SIZE)[:, None] & live_n[None, :]
            value_mask = live_n[:, None] & (d < HEAD_SIZE)[None, :]
            keys = tl.load(key_ptr + key_offset, mask=key_mask, other=0.0)
            values = tl.load(value_ptr + value_offset, mask=value_mask, other=0.0)
            scores = tl.dot(q, keys, input_precision="ieee") * scale
            attends = live_n[None, :] & (slot_position[None, :] <= position[:, None])
            scores = tl.where(attends, scores, float("-inf"))
            # Block 0 gives every live query a finite maximum, so no later block divides infinities.
            new_best = tl.maximum(best, tl.max(scores, 1))
            decay = tl.exp(best - new_best)
            weights = tl.exp(scores - new_best[:, None])
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None] + tl.dot(weights, values, input_precision="ieee")
            best = new_best
        tl.store(out_ptr + token * out_token_stride + lane, acc / total[:, None], mask=q_mask)


def tile_sizes(*, block_size: int, head_size: int, group: int) -> dict[str, int]:
    """Compile-time sizes of the kernel.

    Args:
        block_size: Tokens per KV block.
        head_size: Width of a head; padded to a power of two under masks.
        group: Query heads per KV head, packed into the rows of one tile with as many queries as fit.
    """
    rows = max(TILE_ROWS, triton.next_power_of_2(group))
    return {
        "BLOCK_SIZE": block_size,
        "HEAD_SIZE": head_size,
        "GROUP": group,
        "TILE_QUERIES": rows // group,
        "BLOCK_M": rows,
        "BLOCK_N": max(16, triton.next_power_of_2(block_size)),
        "BLOCK_D": max(16, triton.next_power_of_2(head_size)),
    }


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    query_start: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of each row's new tokens over its paged context, as the reference computes it.

    Query i of a row with n new tokens is at position `p = context_len - n + i` and attends `0..p`:
    `out = sum_t softmax_t(scale * q . k_t) v_t`, by an online softmax over the live KV blocks in ascending
    order. A block that a query does not attend leaves its sums as they are (factor exp(0), weights 0), so a
    query's bits do not depend on its neighbours. Products are float32 throughout, never TF32.

    Moves, for each tile of queries and KV head, `2 * num_attended * head_size * 4` bytes of KV once for all
    heads of the group, and `2 * T * num_heads * head_size * 4` bytes of q and out in all.

    Source: the online softmax of Dao, "FlashAttention-2" (2023), arXiv:2307.08691, over the block tables of
    Kwon et al., "PagedAttention" (2023), arXiv:2309.06180.

    Args:
        q: [T, num_heads * head_size] float32, each row dense.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size] float32, any strides.
        value_cache: As `key_cache`, of strides of its own. Slots beyond a row's context may hold anything.
        block_table: [R, max_blocks] int32, logical to physical block.
        context_len: [R] int32, tokens that a row's last new token attends, itself included.
        query_start: [R + 1] int32, first token of each row, then T. Of a row without tokens nothing is read.
        scale: Factor on the dot products.

    Returns:
        [T, num_heads * head_size] float32.

    Raises:
        ValueError: Rows of q or of the block table are not dense.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    if not q.is_cuda and not isinstance(paged_attention_kernel, InterpretedFunction):
        raise RuntimeError(
            "CPU tensors: prepare_triton() says where they must be, before anything imports triton"
        )
    num_tokens, width = q.shape
    _, block_size, num_kv_heads, head_size = key_cache.shape
    if q.stride(1) != 1 or block_table.stride(1) != 1:
        raise ValueError(f"rows of q and block_table must be dense: {q.stride()}, {block_table.stride()}")
    out = q.new_empty(q.shape)
    sizes = tile_sizes(block_size=block_size, head_size=head_size, group=width // (num_kv_heads * head_size))
    num_rows = context_len.shape[0]
    if num_tokens:
        grid = (num_tokens // sizes["TILE_QUERIES"] + num_rows, num_kv_heads)
        paged_attention_kernel[grid](
            q,
            out,
            key_cache,
            value_cache,
            block_table,
            context_len,
            query_start,
            num_rows,
            scale,
            q.stride(0),
            out.stride(0),
            block_table.stride(0),
            *key_cache.stride(),
            *value_cache.stride(),
            **sizes,
        )
    return out
