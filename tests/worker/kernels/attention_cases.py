"""Paged attention inputs of odd shapes, and attention written out plainly in float64."""

from dataclasses import dataclass

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

    What a row without tokens must not be asked for, its table and its context, is out of all bounds.
    """

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    context_len: Tensor
    query_start: Tensor
    scale: float

    def arguments(self) -> tuple[Tensor | float, ...]:
        """In the operator's order."""
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


def make_case(
    rows: list[tuple[int, int]],
    *,
    group: int,
    head_size: int,
    num_kv_heads: int = 2,
    block_size: int = 16,
    extra_blocks: int = 2,
    seed: int = 0,
) -> AttentionCase:
    """Draws a case; physical blocks are scattered over the middle layer of a pool."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // block_size) for context, _ in rows]
    num_blocks = sum(needed) + 3
    kv = KvStorage(
        num_blocks=num_blocks,
        num_layers=3,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
    )
    kv.data.fill_(float("nan"))
    free = torch.randperm(num_blocks - 1, generator=generator).add(1).tolist()
    table = torch.zeros(len(rows), max(needed) + extra_blocks, dtype=torch.int32)
    for row, (context, count) in enumerate(rows):
        if not count:
            table[row] = UNREADABLE
            continue
        for logical in range(needed[row]):
            physical = free.pop()
            table[row, logical] = physical
            live = min(block_size, context - logical * block_size)
            for cache in (kv.keys[1], kv.values[1]):
                cache[physical, :live] = torch.randn(live, num_kv_heads, head_size, generator=generator)
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
    )


def plain_attention(case: AttentionCase) -> Tensor:
    """Each query's softmax over its context, one query and head at a time in float64."""
    _, block_size, num_kv_heads, head_size = case.key_cache.shape
    out = torch.empty_like(case.q, dtype=torch.float64)
    num_heads = case.q.shape[1] // head_size
    for row, context in enumerate(case.context_len.tolist()):
        start, end = case.query_start[row : row + 2].tolist()
        if start == end:
            continue
        slots = torch.arange(context)
        blocks = case.block_table[row].long()[slots // block_size]
        keys = case.key_cache[blocks, slots % block_size].double()
        values = case.value_cache[blocks, slots % block_size].double()
        for token in range(start, end):
            attended = context - (end - token) + 1
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                lanes = slice(head * head_size, (head + 1) * head_size)
                scores = keys[:attended, kv_head] @ case.q[token, lanes].double() * case.scale
                out[token, lanes] = scores.softmax(0) @ values[:attended, kv_head]
    return out
