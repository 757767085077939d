"""A draw from what top_k, top_p and min_p leave of a row."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import triton
import triton.language as tl

from worker.kernels.triton.logits_filters import (
    LOWEST_KEY,
    NO_LIMIT,
    candidates_at,
    cut_by_count,
    cut_by_mass,
    first_beyond,
    highest_key_with_count,
    highest_key_with_mass,
    key_of,
    lowest_key_with_weight,
    mass_from,
    weight_of_key,
)
from worker.kernels.triton.logits_scan import float32_at, float64_at


@triton.jit  # type: ignore[untyped-decorator]
def list_candidates(  # type: ignore[no-untyped-def]
    row_ptr,
    selected_ptr,
    ids_ptr,
    vocab_size,
    keys,
    low,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    """Writes the ids of all logits that reach a key, ascending, up to `MOST`; groups below it are not read.

    Returns:
        How many there are.
    """
    is_selected = keys >= low.to(tl.int32)
    rank = tl.cumsum(is_selected.to(tl.int32), 0) - 1
    tl.store(selected_ptr + rank, tl.arange(0, SLOTS), mask=is_selected)
    num_lanes = tl.sum(is_selected.to(tl.int32)) * GROUP
    tl.debug_barrier()
    count = 0
    for start in range(0, num_lanes, TILE):
        lane = start + tl.arange(0, TILE)
        group = tl.load(selected_ptr + lane // GROUP, mask=lane < num_lanes, other=0)
        token_id = group * GROUP + lane % GROUP
        live = (lane < num_lanes) & (token_id < vocab_size)
        x = tl.load(row_ptr + token_id, mask=live, other=float("-inf"))
        reaches = live & (key_of(x) >= low.to(tl.int32))
        place = count + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(ids_ptr + place, token_id, mask=reaches & (place < MOST))
        count += tl.sum(reaches.to(tl.int32))
    tl.debug_barrier()
    return count


@triton.jit  # type: ignore[untyped-decorator]
def kept_at(  # type: ignore[no-untyped-def]
    row_ptr,
    ids_ptr,
    start,
    num_candidates,
    is_listed,
    threshold,
    num_equal,
    best,
    per_degree,
    TILE: tl.constexpr,
):
    """Of a tile of candidates those above a threshold and the first `num_equal` of those that equal it.

    Returns:
        Ids, weights (float64, 0 for those that are not kept), and how many equal the threshold.
    """
    token_id, x = candidates_at(row_ptr, ids_ptr, start, num_candidates, is_listed, TILE)
    key = key_of(x)
    is_equal = (key == threshold).to(tl.int32)
    is_kept = (key > threshold) | ((key == threshold) & (tl.cumsum(is_equal, 0) <= num_equal))
    weights = tl.where(is_kept, tl.exp((x - best) * per_degree), 0.0).to(tl.float64)
    return token_id, weights, tl.sum(is_equal)


@triton.jit  # type: ignore[untyped-decorator]
def draw_filtered(  # type: ignore[no-untyped-def]
    row_ptr,
    draw_ptr,
    selected_ptr,
    ids_ptr,
    vocab_size,
    num_groups,
    largest,
    weights,
    best,
    per_degree,
    random,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
):
    """Cuts the ranking where the shortest filter ends, then draws from what is left in the order of ids."""
    top_k = tl.load(draw_ptr + TOP_K)
    top_p = float64_at(draw_ptr, TOP_P)
    min_p = float32_at(draw_ptr, MIN_P)
    has_k = (top_k > 0) & (top_k < vocab_size)
    has_p = top_p < 1.0
    keys = key_of(largest)
    lowest = tl.full([], LOWEST_KEY, tl.int64)
    best_key = key_of(best).to(tl.int64)
    total = tl.sum(weights)

    least = lowest
    if min_p > 0.0:
        least = lowest_key_with_weight(tl.minimum(min_p, 1.0).to(tl.float64), best, per_degree)
    # A key that every kept candidate reaches: groups below it need not be read again.
    low = least
    if has_k:
        low = lowest
        if top_k <= num_groups:
            low = highest_key_with_count(keys, top_k, lowest, best_key)
    elif has_p:
        peaks = tl.exp((largest - best) * per_degree).to(tl.float64)
        low = highest_key_with_mass(keys, peaks, top_p * total, lowest, best_key)
    num_candidates = vocab_size
    is_listed = low > lowest
    if is_listed:
        num_candidates = list_candidates(
            row_ptr, selected_ptr, ids_ptr, vocab_size, keys, low, GROUP, SLOTS, TILE, MOST
        )
        is_listed = num_candidates <= MOST
        num_candidates = tl.where(is_listed, num_candidates, vocab_size)

    threshold = low
    num_equal = tl.full([], NO_LIMIT, tl.int32)
    if has_k:
        threshold, num_equal = cut_by_count(
            row_ptr, ids_ptr, num_candidates, is_listed, top_k, low, best_key, TILE
        )
        total = mass_from(
            row_ptr, ids_ptr, num_candidates, is_listed, threshold + 1, best, per_degree, TILE
        ) + num_equal.to(tl.float64) * weight_of_key(threshold, best, per_degree)
    if has_p:
        cut, wanted = cut_by_mass(
            row_ptr,
            ids_ptr,
            num_candidates,
            is_listed,
            top_p * total,
            best,
            per_degree,
            threshold,
            best_key,
            TILE,
        )
        num_equal = tl.where(cut == threshold, tl.minimum(num_equal, wanted), wanted)
        threshold = cut
    num_equal = tl.where(least > threshold, NO_LIMIT, num_equal)
    threshold = tl.maximum(least, threshold).to(tl.int32)

    mass = tl.zeros([], tl.float64)
    num_before = 0
    for start in range(0, num_candidates, TILE):
        _, weights_kept, num_found = kept_at(
            row_ptr,
            ids_ptr,
            start,
            num_candidates,
            is_listed,
            threshold,
            num_equal - num_before,
            best,
            per_degree,
            TILE,
        )
        mass += tl.sum(weights_kept)
        num_before += num_found
    target = random * mass
    mass = tl.zeros([], tl.float64)
    num_before = 0
    found = tl.full([], NO_LIMIT, tl.int32)
    last = tl.full([], -1, tl.int32)
    for start in range(0, num_candidates, TILE):
        token_id, weights_kept, num_found = kept_at(
            row_ptr,
            ids_ptr,
            start,
            num_candidates,
            is_listed,
            threshold,
            num_equal - num_before,
            best,
            per_degree,
            TILE,
        )
        first, furthest = first_beyond(token_id, weights_kept, mass, target)
        found = tl.minimum(found, first)
        last = tl.maximum(last, furthest)
        mass += tl.sum(weights_kept)
        num_before += num_found
    return tl.where(found == NO_LIMIT, last, found)
