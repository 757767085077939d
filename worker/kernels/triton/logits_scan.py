"""The one pass over the vocabulary before a draw: entries are applied, groups of logits summed up."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import triton
import triton.language as tl

_FLOAT32_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)

_INFINITE_BITS: tl.constexpr = tl.constexpr(0x7F800000)

MAX: tl.constexpr = tl.constexpr(0)
"""Field of a group: its largest logit after entries; NaN where a raw one is not finite."""
SUM: tl.constexpr = tl.constexpr(1)
"""Its weights, relative to that largest one, at the row's temperature."""
RAW_MAX: tl.constexpr = tl.constexpr(2)
"""Its largest raw logit, where a logprob is wanted."""
RAW_SUM: tl.constexpr = tl.constexpr(3)
"""Its weights by raw logits, relative to that one, at temperature 1."""
FIELDS: tl.constexpr = tl.constexpr(4)
"""Fields of a group."""


@triton.jit
def float64_at(words_ptr, word):  # type: ignore[no-untyped-def]
    """The float64 in two words that start at an even one."""
    return tl.load((words_ptr + word).to(tl.pointer_type(tl.float64)))


@triton.jit
def float32_at(words_ptr, word):  # type: ignore[no-untyped-def]
    """The float32 in a word."""
    return tl.load(words_ptr + word).to(tl.float32, bitcast=True)


@triton.jit
def _finite(largest):  # type: ignore[no-untyped-def]
    """0 for a group without candidates, whose differences would be NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit  # type: ignore[untyped-decorator]
def _apply_entries(  # type: ignore[no-untyped-def]
    row_ptr,
    draw_ptr,
    entries_ptr,
    raw_ptr,
    first_id,
    end_id,
    BLOCK: tl.constexpr,
    ENTRY_WORDS: tl.constexpr,
    FIRST_ENTRY: tl.constexpr,
    NUM_ENTRIES: tl.constexpr,
    REPETITION: tl.constexpr,
    INVERSE_REPETITION: tl.constexpr,
):
    """Changes the logits of `first_id .. end_id - 1` that the row has entries for, and keeps the raw ones."""
    repetition = float64_at(draw_ptr, REPETITION)
    inverse = float64_at(draw_ptr, INVERSE_REPETITION)
    first = tl.load(draw_ptr + FIRST_ENTRY)
    end = first + tl.load(draw_ptr + NUM_ENTRIES)
    for start in range(first, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        words_ptr = entries_ptr + entry.to(tl.int64) * ENTRY_WORDS
        token_id = tl.load(words_ptr, mask=entry < end, other=-1)
        mine = (token_id >= first_id) & (token_id < end_id)
        raw = tl.load(row_ptr + token_id, mask=mine, other=0.0)
        tl.store(raw_ptr + entry, raw, mask=mine)
        in_log = tl.load(words_ptr + 1, mask=mine, other=0) != 0
        offset = tl.load((words_ptr + 2).to(tl.pointer_type(tl.float64)), mask=mine, other=0.0)
        logit = raw.to(tl.float64)
        logit = tl.where(in_log, logit * tl.where(logit > 0.0, inverse, repetition), logit)
        logit = tl.minimum(logit + offset, _FLOAT32_MAX)
        tl.store(row_ptr + token_id, logit.to(tl.float32), mask=mine)


@triton.jit  # type: ignore[untyped-decorator]
def logits_scan_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    draws_ptr,
    entries_ptr,
    raw_ptr,
    groups_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,
    DRAW_WORDS: tl.constexpr,
    ENTRY_WORDS: tl.constexpr,
    FLAGS: tl.constexpr,
    FIRST_ENTRY: tl.constexpr,
    NUM_ENTRIES: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    REPETITION: tl.constexpr,
    INVERSE_REPETITION: tl.constexpr,
    GREEDY: tl.constexpr,
    WANTS_LOGPROB: tl.constexpr,
):
    """One program per row and chunk of the vocabulary; see `logits_sample`."""
    num_groups = tl.cdiv(VOCAB_SIZE, GROUP)
    row = tl.program_id(0).to(tl.int64)
    draw_ptr = draws_ptr + row * DRAW_WORDS
    flags = tl.load(draw_ptr + FLAGS)
    if flags != 0:
        row_ptr = logits_ptr + row * logits_stride
        first_id = tl.program_id(1) * CHUNK
        group = tl.arange(0, CHUNK // GROUP)
        token_id = first_id + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        live = token_id < VOCAB_SIZE
        group += tl.program_id(1) * (CHUNK // GROUP)
        out_ptr = groups_ptr + row * FIELDS * num_groups + group
        out_mask = group < num_groups
        x = tl.load(row_ptr + token_id, mask=live, other=float("-inf"))
        # By its bits, sign apart, what is not finite is above all that is; a vector of truth values would be
        # put together in local memory.
        size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        x = tl.where(size < _INFINITE_BITS, x, float("-inf"))
        has_bad = tl.max(tl.where(live, size, 0), 1) >= _INFINITE_BITS
        if flags & WANTS_LOGPROB:
            largest = tl.max(x, 1)
            total = tl.sum(tl.exp(x - _finite(largest)[:, None]), 1)
            tl.store(out_ptr + RAW_MAX * num_groups, largest, mask=out_mask)
            tl.store(out_ptr + RAW_SUM * num_groups, total, mask=out_mask)
        if tl.load(draw_ptr + NUM_ENTRIES) > 0:
            end_id = tl.minimum(first_id + CHUNK, VOCAB_SIZE)
            # No thread may change a logit that another has not read yet, nor read one that is to be changed.
            tl.debug_barrier()
            _apply_entries(
                row_ptr,
                draw_ptr,
                entries_ptr,
                raw_ptr,
                first_id,
                end_id,
                ENTRY_BLOCK,
                ENTRY_WORDS,
                FIRST_ENTRY,
                NUM_ENTRIES,
                REPETITION,
                INVERSE_REPETITION,
            )
            tl.debug_barrier()
            # What is not finite is -inf by now, as what lies behind the vocabulary.
            x = tl.load(row_ptr + token_id, mask=x > float("-inf"), other=float("-inf"))
        largest = tl.max(x, 1)
        tl.store(out_ptr + MAX * num_groups, tl.where(has_bad, float("nan"), largest), mask=out_mask)
        if (flags & GREEDY) == 0:
            per_degree = 1.0 / float32_at(draw_ptr, TEMPERATURE)
            total = tl.sum(tl.exp((x - _finite(largest)[:, None]) * per_degree), 1)
            tl.store(out_ptr + SUM * num_groups, total, mask=out_mask)
