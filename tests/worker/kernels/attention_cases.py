"""Paged attention inputs of odd shapes, and attention written out plainly in float64."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.kv.storage import KvStorage

ODD_SHAPES = {
    "one token": [(1, 1)],
    "block border": [(15, 15), (16, 16), (17, 17)],
    "decode at the border": [(15, 1), (16, 1), (17, 1), (33, 1)],
    "rows without tokens": [(5, 0), (20, 2), (0, 0), (0, 0), (33, 1), (16, 0)],
    "ragged": [(40, 3), (1, 1), (31, 31), (64, 1), (50, 18), (7, 2)],
}
"""Rows as (context_len, new tokens)."""
UNREADABLE = 2**31 - 1


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of `paged_attention`; unused slots are NaN and unused table entries name such a block.

    What a row without tokens must not be asked for, its table and its context, is out of all bounds; so is
    what lies before the window of a row's first token.
    """

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    context_len: Tensor
    query_start: Tensor
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    def arguments(self) -> tuple[Tensor | float, ...]:
        """In the operator's order."""
        return tuple(getattr(self, name) for name in list(self.__dataclass_fields__)[:7])

    def options(self) -> dict[str, Any]:
        """What is given by keyword."""
        return {name: getattr(self, name) for name in list(self.__dataclass_fields__)[7:]}


def make_case(
    rows: list[tuple[int, int]],
    *,
    group: int,
    head_size: int,
    num_kv_heads: int = 2,
    block_size: int = 16,
    extra_blocks: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    keys_across: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
) -> AttentionCase:
    """Draws a case; physical blocks are scattered over the middle layer of a pool. float8 gets scales."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // block_size) for context, _ in rows]
    num_blocks = sum(needed) + 3
    is_fp8 = dtype == torch.float8_e4m3fn
    kv = KvStorage(
        num_blocks=num_blocks,
        num_layers=3,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        keys_across=keys_across,
    )
    if is_fp8:
        kv.data.view(torch.uint8).fill_(0x7F)
    else:
        kv.data.fill_(float("nan"))
    free = torch.randperm(num_blocks - 1, generator=generator).add(1).tolist()
    table = torch.zeros(len(rows), max(needed) + extra_blocks, dtype=torch.int32)
    for row, (context, count) in enumerate(rows):
        if not count:
            table[row] = UNREADABLE
            continue
        first_slot = max(0, context - count + 1 - window) if window else 0
        for logical in range(needed[row]):
            if (logical + 1) * block_size <= first_slot:
                table[row, logical] = UNREADABLE
                continue
            physical = free.pop()
            table[row, logical] = physical
            live = min(block_size, context - logical * block_size)
            for cache in (kv.keys[1], kv.values[1]):
                drawn = torch.randn(live, num_kv_heads, head_size, generator=generator).to(dtype)
                place = cache.view(torch.uint8) if is_fp8 else cache
                place[physical, :live] = drawn.view(torch.uint8) if is_fp8 else drawn
                place[physical, : max(0, first_slot - logical * block_size)] = 0x7F if is_fp8 else torch.nan
    counts = torch.tensor([0] + [count for _, count in rows])
    return AttentionCase(
        q=torch.randn(int(counts.sum()), num_kv_heads * group * head_size, generator=generator),
        key_cache=kv.keys[1],
        value_cache=kv.values[1],
        block_table=table,
        context_len=torch.tensor(
            [context if count else UNREADABLE for context, count in rows], dtype=torch.int32
        ),
        query_start=counts.cumsum(0).to(torch.int32),
        scale=head_size**-0.5,
        window=window,
        soft_cap=soft_cap,
        key_scale=torch.rand(num_kv_heads, generator=generator) + 0.5 if is_fp8 else None,
        value_scale=torch.rand(num_kv_heads, generator=generator) + 0.5 if is_fp8 else None,
    )


def plain_attention(case: AttentionCase) -> Tensor:
    """Each query's softmax over its context, one query and head at a time in float64."""
    _, block_size, num_kv_heads, head_size = case.key_cache.shape
    out = torch.empty_like(case.q, dtype=torch.float64)
    num_heads = case.q.shape[1] // head_size
    key_cache, value_cache = case.key_cache.double(), case.value_cache.double()
    if case.key_scale is not None and case.value_scale is not None:
        key_cache, value_cache = key_cache * case.key_scale[:, None], value_cache * case.value_scale[:, None]
    for row, context in enumerate(case.context_len.tolist()):
        start, end = case.query_start[row : row + 2].tolist()
        for token in range(start, end):
            attended = context - (end - token) + 1
            slots = torch.arange(max(0, attended - case.window) if case.window else 0, attended)
            blocks = case.block_table[row].long()[slots // block_size]
            keys, values = (cache[blocks, slots % block_size] for cache in (key_cache, value_cache))
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                lanes = slice(head * head_size, (head + 1) * head_size)
                scores = keys[:, kv_head] @ case.q[token, lanes].double() * case.scale
                if case.soft_cap:
                    scores = case.soft_cap * (scores / case.soft_cap).tanh()
                out[token, lanes] = scores.softmax(0) @ values[:, kv_head]
    return out
