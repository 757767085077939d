"""The draw itself: one program per row, over what the scan found of the row's groups of logits."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import triton
import triton.language as tl

from worker.kernels.triton.logits_filtered import draw_filtered
from worker.kernels.triton.logits_filters import NO_LIMIT, first_beyond
from worker.kernels.triton.logits_scan import FIELDS, MAX, RAW_MAX, RAW_SUM, SUM, float32_at, float64_at
from worker.kernels.triton.philox import uniform


@triton.jit  # type: ignore[untyped-decorator]
def _draw_unfiltered(  # type: ignore[no-untyped-def]
    row_ptr, vocab_size, weights, best, per_degree, random, GROUP: tl.constexpr, SLOTS: tl.constexpr
):
    """Picks the group by its cumulative weight, then the token within it."""
    groups = tl.arange(0, SLOTS)
    total = tl.sum(weights)
    target = random * total
    group, last = first_beyond(groups, weights, 0.0, target)
    group = tl.where(group == NO_LIMIT, last, group)
    # Of equal groups before it the same sums as in the choice: a prefix is added in one order.
    before = tl.sum(tl.where(groups == group, tl.cumsum(weights, 0) - weights, 0.0))
    token_id = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(row_ptr + token_id, mask=token_id < vocab_size, other=float("-inf"))
    inner = tl.exp((x - best) * per_degree).to(tl.float64)
    first, last = first_beyond(token_id, inner, before, target)
    return tl.where(first == NO_LIMIT, last, first)


@triton.jit  # type: ignore[untyped-decorator]
def _raw_logit(  # type: ignore[no-untyped-def]
    row_ptr,
    draw_ptr,
    entries_ptr,
    raw_ptr,
    token_id,
    BLOCK: tl.constexpr,
    ENTRY_WORDS: tl.constexpr,
    FIRST_ENTRY: tl.constexpr,
    NUM_ENTRIES: tl.constexpr,
):
    """The logit as it was before the row's entries."""
    logit = tl.load(row_ptr + token_id)
    first = tl.load(draw_ptr + FIRST_ENTRY)
    end = first + tl.load(draw_ptr + NUM_ENTRIES)
    for start in range(first, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        words_ptr = entries_ptr + entry.to(tl.int64) * ENTRY_WORDS
        is_it = tl.load(words_ptr, mask=entry < end, other=-1) == token_id
        raw = tl.load(raw_ptr + entry, mask=is_it, other=0.0)
        logit = tl.where(tl.max(is_it.to(tl.int32)) != 0, tl.sum(tl.where(is_it, raw, 0.0)), logit)
    return logit


@triton.jit  # type: ignore[untyped-decorator]
def logits_draw_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    draws_ptr,
    entries_ptr,
    raw_ptr,
    groups_ptr,
    selected_ptr,
    candidates_ptr,
    fed_ptr,
    token_ids_ptr,
    logprobs_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,
    DRAW_WORDS: tl.constexpr,
    ENTRY_WORDS: tl.constexpr,
    FLAGS: tl.constexpr,
    SLOT: tl.constexpr,
    FIRST_ENTRY: tl.constexpr,
    NUM_ENTRIES: tl.constexpr,
    TOP_K: tl.constexpr,
    POSITION: tl.constexpr,
    SEED: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    GREEDY: tl.constexpr,
    WANTS_LOGPROB: tl.constexpr,
):
    """One program per row; see `logits_sample`."""
    num_groups = tl.cdiv(VOCAB_SIZE, GROUP)
    row = tl.program_id(0).to(tl.int64)
    draw_ptr = draws_ptr + row * DRAW_WORDS
    flags = tl.load(draw_ptr + FLAGS)
    drawn = tl.full([], -1, tl.int32)
    logprob = float("nan")
    if flags != 0:
        row_ptr = logits_ptr + row * logits_stride
        groups = tl.arange(0, SLOTS)
        live = groups < num_groups
        group_ptr = groups_ptr + row * FIELDS * num_groups + groups
        largest = tl.load(group_ptr + MAX * num_groups, mask=live, other=float("-inf"))
        is_bad = tl.max((largest != largest).to(tl.int32)) != 0
        best = tl.max(largest)
        if (not is_bad) & (best > float("-inf")):
            if flags & GREEDY:
                group = tl.min(tl.where(largest == best, groups, NO_LIMIT))
                token_id = group * GROUP + tl.arange(0, GROUP)
                x = tl.load(row_ptr + token_id, mask=token_id < VOCAB_SIZE, other=float("-inf"))
                drawn = tl.min(tl.where(x == best, token_id, NO_LIMIT))
            else:
                per_degree = 1.0 / float32_at(draw_ptr, TEMPERATURE)
                seed = tl.load((draw_ptr + SEED).to(tl.pointer_type(tl.uint64)))
                random = uniform(seed, tl.load(draw_ptr + POSITION))
                sums = tl.load(group_ptr + SUM * num_groups, mask=live, other=0.0).to(tl.float64)
                weights = sums * tl.exp((largest - best) * per_degree).to(tl.float64)
                top_k = tl.load(draw_ptr + TOP_K)
                keeps_all = (top_k == 0) | (top_k >= VOCAB_SIZE)
                keeps_all = keeps_all & (float64_at(draw_ptr, TOP_P) >= 1.0)
                if keeps_all & (float32_at(draw_ptr, MIN_P) <= 0.0):
                    drawn = _draw_unfiltered(
                        row_ptr, VOCAB_SIZE, weights, best, per_degree, random, GROUP, SLOTS
                    )
                else:
                    drawn = draw_filtered(
                        row_ptr,
                        draw_ptr,
                        selected_ptr + row * num_groups,
                        candidates_ptr + row * MOST,
                        VOCAB_SIZE,
                        num_groups,
                        largest,
                        weights,
                        best,
                        per_degree,
                        random,
                        GROUP,
                        SLOTS,
                        TILE,
                        MOST,
                        TOP_K,
                        TOP_P,
                        MIN_P,
                    )
            if flags & WANTS_LOGPROB:
                peak = tl.load(group_ptr + RAW_MAX * num_groups, mask=live, other=float("-inf"))
                total = tl.load(group_ptr + RAW_SUM * num_groups, mask=live, other=0.0).to(tl.float64)
                highest = tl.max(peak)
                total = tl.sum(total * tl.exp(peak - highest).to(tl.float64))
                raw = _raw_logit(
                    row_ptr,
                    draw_ptr,
                    entries_ptr,
                    raw_ptr,
                    drawn,
                    ENTRY_BLOCK,
                    ENTRY_WORDS,
                    FIRST_ENTRY,
                    NUM_ENTRIES,
                )
                logprob = raw - highest - tl.log(total.to(tl.float32))
        slot = tl.load(draw_ptr + SLOT)
        tl.store(fed_ptr + slot, drawn, mask=slot >= 0)
    tl.store(token_ids_ptr + row, drawn)
    tl.store(logprobs_ptr + row, logprob)
