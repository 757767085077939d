"""Which candidates top_k, top_p and min_p leave, without sorting: thresholds found by bisection.

Logits are compared by their key: their bits as an integer of the same order. All sums run in one fixed
order. `kept` candidates are those above a threshold and the first few, by id, of those that equal it.
"""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import triton
import triton.language as tl

LOWEST_KEY: tl.constexpr = tl.constexpr(-(2**31) + 0x7FFFFF)
"""That of -inf."""
NO_LIMIT: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def key_of(x):  # type: ignore[no-untyped-def]
    """Float32 to int32, in order; both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weight_of_key(key, best, per_degree):  # type: ignore[no-untyped-def]
    """Weight, float64, of a logit that is given by its key, int64."""
    bits = key.to(tl.int32)
    x = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp((x - best) * per_degree).to(tl.float64)


@triton.jit
def highest_key_with_count(keys, count, low, high):  # type: ignore[no-untyped-def]
    """The highest key, of `low` and up, that at least `count` of `keys` reach."""
    while low < high:
        middle = (low + high + 1) >> 1
        enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32)) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def highest_key_with_mass(keys, weights, mass, low, high):  # type: ignore[no-untyped-def]
    """The highest key, of `low` and up, such that those of `keys` that reach it weigh at least `mass`."""
    while low < high:
        middle = (low + high + 1) >> 1
        enough = tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0)) >= mass
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def lowest_key_with_weight(weight, best, per_degree):  # type: ignore[no-untyped-def]
    """The lowest key whose weight is at least `weight`, which is not over 1."""
    low = tl.full([], LOWEST_KEY, tl.int64)
    high = key_of(best).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        enough = weight_of_key(middle, best, per_degree) >= weight
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return high


@triton.jit  # type: ignore[untyped-decorator]
def candidates_at(row_ptr, ids_ptr, start, num_candidates, is_listed, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ids and logits of a tile of candidates: those listed, else the whole vocabulary; -inf behind them."""
    lane = start + tl.arange(0, TILE)
    live = lane < num_candidates
    token_id = tl.where(is_listed, tl.load(ids_ptr + lane, mask=live & is_listed, other=0), lane)
    return token_id, tl.load(row_ptr + token_id, mask=live, other=float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def count_from(row_ptr, ids_ptr, num_candidates, is_listed, key, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many candidates reach a key."""
    count = 0
    for start in range(0, num_candidates, TILE):
        _, x = candidates_at(row_ptr, ids_ptr, start, num_candidates, is_listed, TILE)
        count += tl.sum((key_of(x) >= key.to(tl.int32)).to(tl.int32))
    return count


@triton.jit  # type: ignore[untyped-decorator]
def mass_from(  # type: ignore[no-untyped-def]
    row_ptr, ids_ptr, num_candidates, is_listed, key, best, per_degree, TILE: tl.constexpr
):
    """What the candidates that reach a key weigh, float64."""
    mass = tl.zeros([], tl.float64)
    for start in range(0, num_candidates, TILE):
        _, x = candidates_at(row_ptr, ids_ptr, start, num_candidates, is_listed, TILE)
        weights = tl.exp((x - best) * per_degree).to(tl.float64)
        mass += tl.sum(tl.where(key_of(x) >= key.to(tl.int32), weights, 0.0))
    return mass


@triton.jit  # type: ignore[untyped-decorator]
def cut_by_count(row_ptr, ids_ptr, num_candidates, is_listed, count, low, high, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Threshold that leaves `count` candidates, at least that many of which reach `low`.

    Returns:
        The key, int64, and how many of those that equal it are left.
    """
    while low < high:
        middle = (low + high + 1) >> 1
        found = count_from(row_ptr, ids_ptr, num_candidates, is_listed, middle, TILE)
        low = tl.where(found >= count, middle, low)
        # A threshold need not be a candidate.
        high = tl.where(found > count, high, tl.where(found == count, middle, middle - 1))
    above = count_from(row_ptr, ids_ptr, num_candidates, is_listed, low + 1, TILE)
    return low, count - above


@triton.jit  # type: ignore[untyped-decorator]
def cut_by_mass(  # type: ignore[no-untyped-def]
    row_ptr, ids_ptr, num_candidates, is_listed, mass, best, per_degree, low, high, TILE: tl.constexpr
):
    """Threshold that leaves the fewest candidates, of the likeliest, that weigh at least `mass`.

    Returns:
        As `cut_by_count`.
    """
    while low < high:
        middle = (low + high + 1) >> 1
        found = mass_from(row_ptr, ids_ptr, num_candidates, is_listed, middle, best, per_degree, TILE)
        low = tl.where(found >= mass, middle, low)
        high = tl.where(found >= mass, high, middle - 1)
    above = mass_from(row_ptr, ids_ptr, num_candidates, is_listed, low + 1, best, per_degree, TILE)
    weight = weight_of_key(low, best, per_degree)
    # A float32 quotient, put right by a step: a float64 one is a call, for which registers are spilled.
    wanted = tl.ceil((mass - above).to(tl.float32) / tl.maximum(weight.to(tl.float32), 1e-37))
    wanted = tl.minimum(tl.maximum(wanted, 1.0), 1073741824.0).to(tl.int32)
    is_enough = above + (wanted - 1).to(tl.float64) * weight >= mass
    is_short = above + wanted.to(tl.float64) * weight < mass
    return low, tl.maximum(wanted - is_enough.to(tl.int32) + is_short.to(tl.int32), 1)


@triton.jit
def first_beyond(ids, weights, before, target):  # type: ignore[no-untyped-def]
    """Where cumulative weights, `before` added, pass a target.

    Returns:
        The first id beyond, NO_LIMIT if there is none, and the last id with a weight, -1 if there is none.
    """
    has_weight = weights > 0.0
    is_beyond = has_weight & (before + tl.cumsum(weights, 0) > target)
    first = tl.min(tl.where(is_beyond, ids, NO_LIMIT))
    return first, tl.max(tl.where(has_weight, ids, -1))
