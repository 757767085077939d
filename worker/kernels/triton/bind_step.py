"""A step's inputs out of the buffer in which they travelled, in Triton."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.draw_words import DRAW_WORDS
from worker.kernels.reference.bind_step import Layout
from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.rows import check_rows, compile_case
from worker.kernels.triton.targets import Target

BLOCK = 256
"""Entries of a program: a step of few tokens takes few programs, and one of many enough to fill the chip."""
_SIZES = {"BLOCK": BLOCK, "DRAW_WORDS": DRAW_WORDS, "num_warps": 4}
# Numbers of a bucket: one compiled kernel serves all.
_COUNTS = (
    *("token_ids_at", "position_at", "slot_mapping_at", "query_start_at", "context_len_at", "row_slot_at"),
    *("update_first_at", "update_start_at", "logits_index_at", "draws_at", "updates_at"),
    *("num_tokens", "num_rows", "num_logits", "num_list_programs", "max_blocks", "table_stride"),
    *("slot_stride", "block_size"),
)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def bind_step_kernel(  # type: ignore[no-untyped-def]
    staging_ptr,
    token_ids_at,
    position_at,
    slot_mapping_at,
    query_start_at,
    context_len_at,
    row_slot_at,
    update_first_at,
    update_start_at,
    logits_index_at,
    draws_at,
    updates_at,
    token_ids_ptr,
    position_ptr,
    slot_mapping_ptr,
    table_ptr,
    context_len_ptr,
    query_start_ptr,
    logits_index_ptr,
    slots_ptr,
    fed_ptr,
    num_tokens,
    num_rows,
    num_logits,
    num_list_programs,
    max_blocks,
    table_stride,
    slot_stride,
    block_size,
    BLOCK: tl.constexpr,
    DRAW_WORDS: tl.constexpr,
):
    """The first programs unpack the lists, a block of each; the others a block of a row's table."""
    program = tl.program_id(0)
    live_tokens = tl.load(staging_ptr)
    live_rows = tl.load(staging_ptr + 1)
    live_logits = tl.load(staging_ptr + 2)
    lane = tl.arange(0, BLOCK)
    if program < num_list_programs:
        i = program * BLOCK + lane
        live = i < live_tokens
        wanted = i < num_tokens
        token_id = tl.load(staging_ptr + token_ids_at + i, mask=live, other=0)
        known = tl.load(fed_ptr + (-1 - token_id), mask=token_id < 0, other=0)
        token_id = tl.where(token_id < 0, tl.maximum(known, 0), token_id)
        tl.store(token_ids_ptr + i, token_id, mask=wanted)
        position = tl.load(staging_ptr + position_at + i, mask=live, other=0)
        tl.store(position_ptr + i, position, mask=wanted)
        slot = tl.load(staging_ptr + slot_mapping_at + i, mask=live, other=-1)
        tl.store(slot_mapping_ptr + i, slot.to(tl.int64), mask=wanted)
        start = tl.load(staging_ptr + query_start_at + i, mask=i < live_rows, other=0)
        tl.store(query_start_ptr + i, tl.where(i < live_rows, start, live_tokens), mask=i <= num_rows)
        context_len = tl.load(staging_ptr + context_len_at + i, mask=i < live_rows, other=0)
        tl.store(context_len_ptr + i, context_len, mask=i < num_rows)
        index = tl.load(staging_ptr + logits_index_at + i, mask=i < live_logits, other=0)
        tl.store(logits_index_ptr + i, index, mask=i < num_logits)
        word = tl.arange(0, DRAW_WORDS)
        draw_ptr = staging_ptr + draws_at + i[:, None] * DRAW_WORDS + word[None, :]
        is_padding = (i >= live_logits) & (i < num_logits)
        tl.store(draw_ptr, tl.zeros([BLOCK, DRAW_WORDS], tl.int32), mask=is_padding[:, None])
    else:
        num_blocks_of_row = tl.cdiv(max_blocks, BLOCK)
        row = (program - num_list_programs) // num_blocks_of_row
        column = (program - num_list_programs) % num_blocks_of_row * BLOCK + lane
        if row < live_rows:
            slot = tl.load(staging_ptr + row_slot_at + row).to(tl.int64)
            first = tl.load(staging_ptr + update_first_at + row)
            start = tl.load(staging_ptr + update_start_at + row)
            end = tl.load(staging_ptr + update_start_at + row + 1)
            used = column < tl.cdiv(tl.load(staging_ptr + context_len_at + row), block_size)
            used = used & (column < max_blocks)
            is_new = (column >= first) & (column - first < end - start)
            held_ptr = slots_ptr + slot * slot_stride + column
            held = tl.load(held_ptr, mask=used & ~is_new, other=0)
            new = tl.load(staging_ptr + updates_at + start + column - first, mask=is_new, other=0)
            tl.store(held_ptr, new, mask=is_new)
            row_ptr = table_ptr + row.to(tl.int64) * table_stride + column
            tl.store(row_ptr, tl.where(is_new, new, held), mask=used)


def bind_step(
    staging: Tensor,
    layout: Layout,
    inputs: Sequence[Tensor],
    block_table: Tensor,
    fed: Tensor,
    *,
    num_tokens: int,
    num_rows: int,
    num_logits: int,
    block_size: int,
) -> None:
    """Unpacks and pads a step, as the reference does: one launch, the first of a step.

    New block ids of a row are a run of logical blocks, so each entry of a table is written by one program
    that knows its value: no order among programs matters. Moves twice the live part of the staging buffer,
    the padding, and 8 bytes per block of every row's context.

    Args:
        staging: [layout.num_words] int32, dense; of its draws the padding is written.
        layout: Where its sections lie, with room for the numbers below.
        inputs: The fields of `StepInputs` in order, of at least those numbers; written.
        block_table: [slots, at least max_blocks] int32, rows dense, written.
        fed: [slots] int32, dense, ids that were drawn on the device.
        num_tokens: T to pad to.
        num_rows: R to pad to.
        num_logits: L to pad to.
        block_size: Tokens per block.

    Raises:
        ValueError: A buffer is too small, or not dense.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    names = (
        *("token_ids", "position", "slot_mapping", "inputs.block_table", "context_len", "query_start"),
        "logits_index",
    )
    check_rows(
        bind_step_kernel,
        staging=staging,
        block_table=block_table,
        fed=fed,
        **dict(zip(names, inputs, strict=True)),
    )
    tokens, rows, logits = num_tokens, num_rows, num_logits
    for name, value, least in (
        ("staging", staging, layout.num_words),
        *zip(names, inputs, (tokens, tokens, tokens, rows, rows, rows + 1, logits), strict=True),
    ):
        if len(value) < least:
            raise ValueError(f"{name} has {len(value)} entries, {least} are needed")
    tables = inputs[3]
    max_blocks = tables.shape[1]
    if block_table.shape[1] < max_blocks:
        raise ValueError(f"block_table has {block_table.shape[1]} columns, {max_blocks} are needed")
    num_list_programs = triton.cdiv(max(tokens, rows + 1, logits), BLOCK)
    bind_step_kernel[(num_list_programs + rows * triton.cdiv(max_blocks, BLOCK),)](
        staging,
        layout.token_ids,
        layout.position,
        layout.slot_mapping,
        layout.query_start,
        layout.context_len,
        layout.row_slot,
        layout.update_first,
        layout.update_start,
        layout.logits_index,
        layout.draws,
        layout.updates,
        *inputs,
        block_table,
        fed,
        tokens,
        rows,
        logits,
        num_list_programs,
        max_blocks,
        tables.stride(0),
        block_table.stride(0),
        block_size,
        **_SIZES,
    )


def compile_cases(target: Target) -> list[CompileCase]:
    """The one there is: all sizes are data."""
    pointers = dict.fromkeys(
        (
            *("staging_ptr", "token_ids_ptr", "position_ptr", "table_ptr", "context_len_ptr"),
            *("query_start_ptr", "logits_index_ptr", "slots_ptr", "fed_ptr"),
        ),
        "i32",
    )
    return [
        compile_case(
            "bind_step",
            "any",
            target,
            bind_step_kernel,
            pointers=pointers | {"slot_mapping_ptr": "i64"},
            constants=_SIZES,
            is_named=True,
        )
    ]
