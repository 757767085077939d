"""Attention over paged KV in plain torch, vectorised over (query tile, KV block) pairs."""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE_QUERIES = 4
"""Queries of one row that share a tile; a shorter tile is padded, so that every matrix product of a call
has one shape and a query's bits do not depend on how many others are computed with it. Few, because a decode
row fills one of them; measured on 2 cores, 8 rows at context 500 decode in 160 ms so, in 440 ms with 16."""

MAX_PAIRS = 256
"""(tile, KV block) pairs computed at once, unless one tile alone has more. Bounds the scratch memory, about
60 KB a pair for 9 query and 3 KV heads of 64; measured on 2 cores: 512 tokens of prefill take 1.6 s so, 2.3 s
all at once."""

Tile = tuple[int, int, int, int]
"""Position of the last query, row, first token, number of queries."""


@dataclass(frozen=True, slots=True)
class _Options:
    """What a model or a cache may have beside plain causal attention; see `paged_attention`."""

    window: int
    soft_cap: float
    key_scale: Tensor | None
    value_scale: Tensor | None


def _tiles(context_len: list[int], query_start: list[int]) -> list[Tile]:
    """Cuts rows into tiles, longest context first."""
    tiles = []
    for row, context in enumerate(context_len):
        start, end = query_start[row], query_start[row + 1]
        for first in range(start, end, TILE_QUERIES):
            count = min(TILE_QUERIES, end - first)
            tiles.append((context - (end - first) + count - 1, row, first, count))
    return sorted(tiles, key=lambda tile: -tile[0])


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    query_start: Tensor,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Causal attention of each row's new tokens over its paged context.

    Query i of a row with n new tokens is at position `p = context_len - n + i` and attends `0..p`, with a
    window its last `window` tokens: `out = sum_t softmax_t(cap(scale * q . k_t)) v_t`, where `cap(s)` is s,
    or `soft_cap * tanh(s / soft_cap)`. Each KV block gives a query its maximum m_b, its sum of
    `exp(s - m_b)` and its weighted values; blocks are then merged in ascending order with weights
    `exp(m_b - max_b m_b)`. A block with nothing to attend adds exact zeros, so a query's bits depend on
    its own context alone: not on neighbours, chunk borders or the width of the block table.

    Source: the split softmax of Dao, "FlashAttention-2" (2023), arXiv:2307.08691, over the block tables of
    Kwon et al., "PagedAttention" (2023), arXiv:2309.06180.

    Args:
        q: [T, num_heads * head_size] of any float dtype; rows' new tokens one after another.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size] of any float dtype, or int8, any strides.
            All is computed in float32, or in float64 if q is.
        value_cache: As `key_cache`, maybe of other strides. Slots that no row's context covers may hold
            anything, NaN included.
        block_table: [R, max_blocks] int32, logical to physical block.
        context_len: [R] int32, tokens that a row's last new token attends, itself included.
        query_start: [R + 1] int32, first token of each row, then T. Of a row without tokens nothing is read.
        scale: Factor on the dot products.
        window: Tokens that a query attends at most, itself included; 0 for all. Of blocks before it nothing
            is read.
        soft_cap: Bound of the scores; 0 for none.
        key_scale: [num_kv_heads] float32, or of each token [num_blocks, block_size, num_kv_heads], factor on
            stored keys, or None.
        value_scale: As `key_scale`, of values.

    Returns:
        [T, num_heads * head_size] float32, or float64.
    """
    block_size = key_cache.shape[1]
    q = q if q.dtype == torch.float64 else q.float()
    out = q.new_empty(q.shape)
    options = _Options(window, soft_cap, key_scale, value_scale)
    pending: list[Tile] = []
    num_pairs = 0
    for tile in _tiles(context_len.tolist(), query_start.tolist()):
        num_blocks = tile[0] // block_size + 1
        if pending and num_pairs + num_blocks > MAX_PAIRS:
            _attend(pending, q, key_cache, value_cache, block_table, scale, options, out)
            pending, num_pairs = [], 0
        pending.append(tile)
        num_pairs += num_blocks
    if pending:
        _attend(pending, q, key_cache, value_cache, block_table, scale, options, out)
    return out


def _attend(
    tiles: list[Tile],
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    scale: float,
    options: _Options,
    out: Tensor,
) -> None:
    """Computes tiles, sorted by context from the longest, into their tokens' rows of `out`."""
    _, block_size, num_kv_heads, head_size = key_cache.shape
    last_position, tile_row, first_token, num_queries = torch.tensor(tiles, device=q.device).unbind(1)
    group = q.shape[1] // (num_kv_heads * head_size)

    # Padding queries repeat the tile's last query; their results are dropped.
    lane = torch.minimum(torch.arange(TILE_QUERIES, device=q.device), num_queries.unsqueeze(1) - 1)
    token = first_token.unsqueeze(1) + lane
    position = (last_position - num_queries + 1).unsqueeze(1) + lane
    q_tiles = q.view(-1, num_kv_heads, group, head_size)[token].permute(0, 2, 1, 3, 4)
    q_tiles = q_tiles.reshape(len(tiles), num_kv_heads, TILE_QUERIES * group, head_size)

    # Pairs go block by block; tiles are sorted by context, so those that own block b are the first ones.
    tiles_of_block = [0] * (tiles[0][0] // block_size + 1)
    for last, *_ in tiles:
        tiles_of_block[last // block_size] += 1
    for block in range(len(tiles_of_block) - 2, -1, -1):
        tiles_of_block[block] += tiles_of_block[block + 1]
    counts = torch.tensor(tiles_of_block, device=q.device)
    pair_block = torch.repeat_interleave(torch.arange(len(tiles_of_block), device=q.device), counts)
    pair_tile = torch.cat([torch.arange(count, device=q.device) for count in tiles_of_block])
    physical = block_table[tile_row[pair_tile], pair_block]
    slot_position = pair_block.unsqueeze(1) * block_size + torch.arange(block_size, device=q.device)
    # An unwritten slot may hold NaN, which a weight of zero would not silence; and what lies before the
    # window may be gone, the block's entry with it.
    unreadable = slot_position > last_position[pair_tile].unsqueeze(1)
    if options.window:
        first_position = (position[:, 0] - options.window + 1)[pair_tile].unsqueeze(1)
        unreadable |= slot_position < first_position
        physical = physical.masked_fill(unreadable.all(1), 0)

    keys = _read(key_cache, physical, options.key_scale, q).permute(0, 2, 3, 1).flatten(0, 1)
    values = _read(value_cache, physical, options.value_scale, q)
    values = values.masked_fill(unreadable[:, :, None, None], 0.0).transpose(1, 2).flatten(0, 1)
    scores = torch.bmm(q_tiles[pair_tile].flatten(0, 1), keys).mul_(scale)
    if options.soft_cap:
        scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
    scores = scores.view(-1, num_kv_heads, TILE_QUERIES, group, block_size)
    ahead = slot_position.unsqueeze(1) > position[pair_tile].unsqueeze(2)
    if options.window:
        ahead |= slot_position.unsqueeze(1) <= position[pair_tile].unsqueeze(2) - options.window
    scores.masked_fill_(ahead[:, None, :, None, :], -torch.inf)

    block_max = scores.amax(dim=-1)
    finite_max = block_max.clamp_min(torch.finfo(q.dtype).min)
    weights = scores.sub_(finite_max.unsqueeze(-1)).exp_()
    block_sum = weights.sum(dim=-1, keepdim=True)
    block_out = torch.bmm(weights.view(-1, TILE_QUERIES * group, block_size), values)
    block_out = block_out.view(-1, num_kv_heads, TILE_QUERIES, group, head_size)

    tile_max = block_max[: len(tiles)].clone()
    parts = torch.split(block_max, tiles_of_block)
    for count, part in zip(tiles_of_block[1:], parts[1:], strict=True):
        torch.maximum(tile_max[:count], part, out=tile_max[:count])
    # A query attends something, so its largest maximum is finite.
    share = (block_max - tile_max[pair_tile]).exp_().unsqueeze(-1)
    total = torch.cat((block_out, block_sum), dim=-1).mul_(share)
    first, *rest = torch.split(total, tiles_of_block)
    for count, part in zip(tiles_of_block[1:], rest, strict=True):
        first[:count] += part

    merged = (first[..., :head_size] / first[..., head_size:]).permute(0, 2, 1, 3, 4)
    live = torch.arange(TILE_QUERIES, device=q.device) < num_queries.unsqueeze(1)
    out[token[live]] = merged[live].flatten(1)


def _read(cache: Tensor, physical: Tensor, scale: Tensor | None, q: Tensor) -> Tensor:
    """Blocks of a cache in q's dtype times scales, [pairs, block_size, num_kv_heads, head_size]."""
    if cache.dtype == torch.float8_e4m3fn:
        # torch has no indexed reads of float8.
        blocks = cache.view(torch.uint8)[physical].view(cache.dtype).to(q.dtype)
    else:
        blocks = cache[physical].to(q.dtype)
    if scale is None:
        return blocks
    return blocks * (scale if scale.dim() == 1 else scale[physical].to(q.dtype))[..., None]
