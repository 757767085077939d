"""How softmax pieces of spans of the context are folded to one result, in registers and by a kernel.

Knows the layout of the workspace, and nothing of keys and values. A piece is a query's maximum (in powers of
two), its sum and its weighted values over one span; pieces are folded in ascending order of spans, by the
same additions whether they come from registers or from the workspace.
"""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import triton
import triton.language as tl

UNROLL = 8
"""Spans that the merge reads ahead of the additions: they wait for memory together, not one by one."""

COUNTS = ("num_tokens", "num_rows", "num_planes", "window")
"""Arguments that differ from call to call: nothing is compiled for their values."""


@triton.jit  # type: ignore[untyped-decorator]
def fold_sums(best, total, piece_best, piece_total, FUSED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One more piece's maximum and sum, [M] float32: the new ones, and the factors on old and new values.

    A piece without tokens (-inf, 0) changes no bit. Multiply-adds are written out here and wherever sums are
    made, so that no compiler chooses what it fuses where; without FUSED, for Triton's interpreter, which
    fuses nothing by itself and takes a thousand times as long for `fma`, they are two operations.
    """
    new_best = tl.maximum(best, piece_best)
    finite = tl.where(new_best == float("-inf"), 0.0, new_best)
    decay = tl.exp2(best - finite)
    share = tl.exp2(piece_best - finite)
    if FUSED:  # noqa: SIM108 - a compile-time branch
        total = tl.fma(total, decay, piece_total * share)
    else:
        total = total * decay + piece_total * share
    return new_best, total, decay, share


@triton.jit  # type: ignore[untyped-decorator]
def fold_values(acc, decay, piece_acc, share, FUSED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One more piece's weighted values, [M, D] float32, by the factors of `fold_sums`."""
    if FUSED:
        acc = tl.fma(acc, tl.broadcast_to(decay[:, None], acc.shape), piece_acc * share[:, None])
    else:
        acc = acc * decay[:, None] + piece_acc * share[:, None]
    return acc


@triton.jit
def finish(total, acc, value_factor, value_scale_ptr, kv_head):  # type: ignore[no-untyped-def]
    """Weighted values over the sum of weights, times the head's value scale if there is one; [M, D]."""
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None] * value_factor
    if value_scale_ptr is not None:
        result = result * tl.load(value_scale_ptr + kv_head)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def find_row(starts_ptr, num_rows, index, DIVISOR: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last row r with `starts[r] // DIVISOR + STEP * r <= index`, by counting: no chain of loads."""
    lane = tl.arange(0, 128)
    count = 0
    for first in range(0, num_rows, 128):
        row = first + lane
        start = tl.load(starts_ptr + row, mask=row < num_rows, other=0)
        count += tl.sum(((start // DIVISOR + STEP * row <= index) & (row < num_rows)).to(tl.int32), 0)
    return count - 1


@triton.jit  # type: ignore[untyped-decorator]
def fold_plane(  # type: ignore[no-untyped-def]
    workspace_ptr,
    maxima_ptr,
    sums_ptr,
    out_ptr,
    value_scale_ptr,
    value_factor,
    out_token_stride,
    num_tokens,
    num_heads,
    token,
    head,
    kv_head,
    live_m,
    is_first,
    is_last,
    HEAD_SIZE: tl.constexpr,
    FUSED: tl.constexpr,
):
    """Folds the piece of plane 1 into the sums of plane 0; the last one goes out.

    Through memory and 32 elements of the head at a time: two sets of sums don't fit beside the products'
    registers.
    """
    kept = token * num_heads + head
    place = kept + num_tokens.to(tl.int64) * num_heads
    kept_mask = live_m & (is_first == 0)
    kept_best = tl.load(maxima_ptr + kept, mask=kept_mask, other=float("-inf"))
    kept_total = tl.load(sums_ptr + kept, mask=kept_mask, other=0.0)
    piece_best = tl.load(maxima_ptr + place, mask=live_m, other=0.0)
    piece_total = tl.load(sums_ptr + place, mask=live_m, other=0.0)
    best, total, decay, share = fold_sums(kept_best, kept_total, piece_best, piece_total, FUSED)
    for chunk in tl.range(0, HEAD_SIZE, 32, loop_unroll_factor=1, num_stages=1):
        d = chunk + tl.arange(0, 32)
        inside = (d < HEAD_SIZE)[None, :]
        kept_at = workspace_ptr + kept[:, None] * HEAD_SIZE + d[None, :]
        piece_at = workspace_ptr + place[:, None] * HEAD_SIZE + d[None, :]
        acc = tl.load(kept_at, mask=kept_mask[:, None] & inside, other=0.0)
        piece_acc = tl.load(piece_at, mask=live_m[:, None] & inside, other=0.0)
        acc = fold_values(acc, decay, piece_acc, share, FUSED)
        mask = live_m[:, None] & inside
        if is_last:
            result = finish(total, acc, value_factor, value_scale_ptr, kv_head).to(out_ptr.dtype.element_ty)
            out_at = out_ptr + token[:, None] * out_token_stride + head[:, None] * HEAD_SIZE + d[None, :]
            tl.store(out_at, result, mask=mask)
        else:
            tl.store(kept_at, acc, mask=mask)
    tl.debug_barrier()
    tl.store(maxima_ptr + kept, best, mask=live_m)
    tl.store(sums_ptr + kept, total, mask=live_m)


@triton.jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator]
def merge_spans_kernel(  # type: ignore[no-untyped-def]
    workspace_ptr,
    out_ptr,
    value_scale_ptr,
    context_len_ptr,
    query_start_ptr,
    num_tokens,
    num_rows,
    num_planes,
    num_heads,
    window,
    value_factor,
    out_token_stride,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    UNROLL: tl.constexpr,
    FUSED: tl.constexpr,
):
    """One program per (token, head) folds the pieces of the spans that the token attends, ascending.

    Reads `num_live_spans * (head_size + 2) * 4` bytes of pieces, writes one head of out.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    row = find_row(query_start_ptr, num_rows, token, 1, 0)
    row_end = tl.load(query_start_ptr + row + 1)
    if token < row_end:
        position = tl.load(context_len_ptr + row) - row_end + token
        first_span = 0
        if WINDOW:
            first_span = tl.maximum(position - window + 1, 0) // SPAN_TOKENS
        end_span = position // SPAN_TOKENS + 1
        one = tl.arange(0, 1)
        d = tl.arange(0, BLOCK_D)[None, :]
        maxima_ptr = workspace_ptr + num_planes.to(tl.int64) * num_tokens * num_heads * HEAD_SIZE
        sums_ptr = maxima_ptr + num_planes.to(tl.int64) * num_tokens * num_heads
        best = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BLOCK_D], tl.float32)
        for chunk in range(first_span, end_span, UNROLL):
            for ahead in tl.static_range(UNROLL):
                span = chunk + ahead
                live = span < end_span
                place = (span.to(tl.int64) * num_tokens + token) * num_heads + head + one
                piece_best = tl.load(maxima_ptr + place, mask=live, other=float("-inf"))
                piece_total = tl.load(sums_ptr + place, mask=live, other=0.0)
                lane = place[:, None] * HEAD_SIZE + d
                piece_acc = tl.load(workspace_ptr + lane, mask=live & (d < HEAD_SIZE), other=0.0)
                best, total, decay, share = fold_sums(best, total, piece_best, piece_total, FUSED)
                acc = fold_values(acc, decay, piece_acc, share, FUSED)
        result = finish(total, acc, value_factor, value_scale_ptr, head // GROUP).to(out_ptr.dtype.element_ty)
        target = out_ptr + token.to(tl.int64) * out_token_stride + head * HEAD_SIZE
        tl.store(target + d, result, mask=d < HEAD_SIZE)
