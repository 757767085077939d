"""The attention kernel: queries of one row, all heads of a group, over spans of the row's paged context.

Knows blocks, masks and the order of additions; sizes and grid come from `paged_attention`, what becomes of
spans from `attention_merge`.
"""
# ruff: noqa: N803, RUF005, SIM108 - compile-time parameters are upper case, as Triton's own are; tuples are
# added, which it knows in every version, and branches that it takes while it compiles are statements
# mypy: disable-error-code="assignment, misc"

import triton
import triton.language as tl

from worker.kernels.triton.attention_merge import COUNTS, find_row, finish, fold_plane


@triton.jit  # type: ignore[untyped-decorator]
def _float16_of(words, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float8_e4m3fn in the low (0) or high (1) byte of uint16 words, as float16: 1/256 of the value.

    Its bits moved: an exponent of bias 7 stands in one of bias 15, so zero and values below the normal ones
    are right too, and the launcher's factors make up for the 256.
    """
    if PART == 0:
        bits = ((words & 0x7F) << 7) | ((words & 0x80) << 8)
    else:
        bits = ((words & 0x7F00) >> 1) | (words & 0x8000)
    return bits.to(tl.float16, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_block(  # type: ignore[no-untyped-def]
    q,
    best,
    total,
    sums,
    start,
    table_ptr,
    key_ptr,
    value_ptr,
    key_block_stride,
    key_slot_stride,
    key_dim_stride,
    value_block_stride,
    value_slot_stride,
    value_dim_stride,
    position,
    begin,
    end,
    window,
    cap_factor,
    factor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE: tl.constexpr,
    PARTS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    FUSED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """`BLOCK_N` tokens from `start` on. With and without MASKED an attended token gives the same bits.

    So every multiply-add is written out, and a mask only replaces scores by -inf. Of float8 two elements are
    read as one word, so that 16 bytes are a thread's share of a product: q and sums are in two PARTS, of even
    and of odd elements of the head.
    """
    slot = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D // PARTS)
    read = slot
    if MASKED:
        # An unwritten slot may hold NaN, which a weight of zero would not silence: the nearest live one is
        # read in its place. So no load has a mask, which costs a branch each where there are no predicates.
        read = tl.minimum(slot, end - 1)
        if WINDOW:
            read = tl.maximum(read, begin)
    if BLOCK_SIZE % BLOCK_N == 0:
        physical = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
    else:
        physical = tl.load(table_ptr + read // BLOCK_SIZE).to(tl.int64)
    inside = read % BLOCK_SIZE
    key_row = key_ptr + physical * key_block_stride + inside * key_slot_stride
    value_row = value_ptr + physical * value_block_stride + inside * value_slot_stride
    key_at = key_row[:, None] + d[None, :] * key_dim_stride
    value_at = value_row[:, None] + d[None, :] * value_dim_stride
    if HEAD_SIZE == BLOCK_D:
        keys = tl.load(key_at)
        values = tl.load(value_at)
    else:
        keys = tl.load(key_at, mask=(d < HEAD_SIZE // PARTS)[None, :], other=0)
        values = tl.load(value_at, mask=(d < HEAD_SIZE // PARTS)[None, :], other=0)
    if PARTS == 2:
        scores = tl.dot(q[0], tl.trans(_float16_of(keys, 0)))
        scores = tl.dot(q[1], tl.trans(_float16_of(keys, 1)), scores)
    else:
        scores = tl.dot(q[0], tl.trans(keys.to(COMPUTE)), input_precision="ieee")
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (1 + exp(2x)); the cap itself is in `factor`.
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * cap_factor))
    if MASKED:
        # Of a tile's rows without a query position and end mean nothing, and what they get is not stored.
        if WINDOW:
            # How far back a token lies; as a number without sign what lies ahead is beyond every window.
            back = position[:, None] - slot[None, :]
            attends = back.to(tl.uint32, bitcast=True) < window.to(tl.uint32)
        else:
            attends = slot[None, :] <= position[:, None]
        scores = tl.where(attends, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1) * factor)
    finite = tl.where(new_best == float("-inf"), 0.0, new_best)
    decay = tl.exp2(best - finite)
    if FUSED:
        spread = tl.broadcast_to(-finite[:, None], scores.shape)
        weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, spread))
        total = tl.fma(total, decay, tl.sum(weights, 1))
    else:
        weights = tl.exp2(scores * factor - finite[:, None])
        total = total * decay + tl.sum(weights, 1)
    weights = weights.to(COMPUTE)
    if PARTS == 2:
        even = tl.dot(weights, _float16_of(values, 0), sums[0] * decay[:, None])
        odd = tl.dot(weights, _float16_of(values, 1), sums[1] * decay[:, None])
        sums = (even, odd)
    else:
        sums = (tl.dot(weights, values.to(COMPUTE), sums[0] * decay[:, None], input_precision="ieee"),)
    return new_best, total, sums


@triton.jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator]
def attend_spans_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    out_ptr,
    workspace_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_table_ptr,
    context_len_ptr,
    query_start_ptr,
    num_tokens,
    num_rows,
    num_planes,
    num_heads,
    window,
    cap_factor,
    factor,
    value_factor,
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
    SPAN_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE: tl.constexpr,
    PARTS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    FUSED: tl.constexpr,
):
    """One program per (tile of queries, KV head, share of the spans); see `paged_attention`.

    The only program of a tile folds its spans itself and writes out; several leave them in the workspace.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_programs = tl.num_programs(2)
    # Row r's tiles start at query_start[r] // TILE_QUERIES + r, which leaves room for each row's short tile.
    row = find_row(query_start_ptr, num_rows, tile, TILE_QUERIES, 1)
    row_start = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - row_start
    first_query = (tile - row_start // TILE_QUERIES - row) * TILE_QUERIES
    if first_query < num_queries:
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        query = first_query + m // GROUP
        head = kv_head * GROUP + m % GROUP
        live_m = (m < TILE_QUERIES * GROUP) & (query < num_queries)
        past = tl.load(context_len_ptr + row) - num_queries
        position = past + query
        token = (row_start + query).to(tl.int64)
        half = tl.arange(0, BLOCK_D // PARTS)
        lane = head[:, None] * HEAD_SIZE + PARTS * half[None, :]
        q_mask = live_m[:, None] & (half < HEAD_SIZE // PARTS)[None, :]
        q = ()
        for part in tl.static_range(PARTS):
            q_at = q_ptr + token[:, None] * q_token_stride + lane + part
            q = q + (tl.load(q_at, mask=q_mask, other=0.0).to(COMPUTE),)

        if key_scale_ptr is not None:
            key_scale = tl.load(key_scale_ptr + kv_head)
            if SOFT_CAP:
                cap_factor = cap_factor * key_scale
            else:
                factor = factor * key_scale
        key_ptr += kv_head.to(tl.int64) * key_head_stride
        value_ptr += kv_head.to(tl.int64) * value_head_stride
        table_ptr = block_table_ptr + row.to(tl.int64) * block_table_stride

        begin = 0
        if WINDOW:
            begin = tl.maximum(past + first_query - window + 1, 0)
        end = past + tl.minimum(first_query + TILE_QUERIES, num_queries)
        # Up to here every query of the tile attends everything.
        common = (past + first_query + 1) // BLOCK_N * BLOCK_N

        num_places = num_planes.to(tl.int64) * num_tokens * num_heads
        maxima_ptr = workspace_ptr + num_places * HEAD_SIZE
        sums_ptr = maxima_ptr + num_places
        first_span = begin // SPAN_TOKENS + tl.program_id(2)
        last_span = (end - 1) // SPAN_TOKENS
        for span in tl.range(first_span, last_span + 1, num_programs, disable_licm=True):
            piece_best = tl.full([BLOCK_M], float("-inf"), tl.float32)
            piece_total = tl.zeros([BLOCK_M], tl.float32)
            sums = ()
            for _ in tl.static_range(PARTS):
                sums = sums + (tl.zeros([BLOCK_M, BLOCK_D // PARTS], tl.float32),)
            span_start = span * SPAN_TOKENS
            span_end = tl.minimum(span_start + SPAN_TOKENS, end)
            # A window has masks at both ends of a short range: it goes without the bulk.
            if WINDOW:
                bulk_end = tl.maximum(span_start, begin // BLOCK_N * BLOCK_N)
            else:
                bulk_end = tl.maximum(tl.minimum(span_end, common), span_start)
                for start in range(span_start, bulk_end, BLOCK_N):
                    piece_best, piece_total, sums = _attend_block(
                        q, piece_best, piece_total, sums, start, table_ptr, key_ptr, value_ptr,
                        key_block_stride, key_slot_stride, key_dim_stride,
                        value_block_stride, value_slot_stride, value_dim_stride,
                        position, begin, end, window, cap_factor, factor,
                        BLOCK_SIZE, HEAD_SIZE, BLOCK_N, BLOCK_D, COMPUTE, PARTS, SOFT_CAP, WINDOW, FUSED,
                        False,
                    )  # fmt: skip
            for start in range(bulk_end, span_end, BLOCK_N):
                piece_best, piece_total, sums = _attend_block(
                    q, piece_best, piece_total, sums, start, table_ptr, key_ptr, value_ptr,
                    key_block_stride, key_slot_stride, key_dim_stride,
                    value_block_stride, value_slot_stride, value_dim_stride,
                    position, begin, end, window, cap_factor, factor,
                    BLOCK_SIZE, HEAD_SIZE, BLOCK_N, BLOCK_D, COMPUTE, PARTS, SOFT_CAP, WINDOW, FUSED, True,
                )  # fmt: skip
            if PARTS == 2:
                piece_acc = tl.reshape(tl.join(sums[0], sums[1]), [BLOCK_M, BLOCK_D])
            else:
                piece_acc = sums[0]
            # Read again: a compiler would keep what it worked out from the first reading through all spans.
            again = (tl.load(query_start_ptr + row, volatile=True) + query).to(tl.int64)
            if (num_programs == 1) & (first_span == last_span):
                result = finish(piece_total, piece_acc, value_factor, value_scale_ptr, kv_head)
                out_place = again[:, None] * out_token_stride + head[:, None] * HEAD_SIZE + d[None, :]
                out_mask = live_m[:, None] & (d < HEAD_SIZE)[None, :]
                tl.store(out_ptr + out_place, result.to(out_ptr.dtype.element_ty), mask=out_mask)
            else:
                plane = tl.where(num_programs == 1, 1, span).to(tl.int64) * num_tokens
                place = (plane + again) * num_heads + head
                tl.store(maxima_ptr + place, piece_best, mask=live_m)
                tl.store(sums_ptr + place, piece_total, mask=live_m)
                value_mask = live_m[:, None] & (d < HEAD_SIZE)[None, :]
                tl.store(workspace_ptr + place[:, None] * HEAD_SIZE + d[None, :], piece_acc, mask=value_mask)
                if num_programs == 1:
                    tl.debug_barrier()
                    fold_plane(
                        workspace_ptr, maxima_ptr, sums_ptr, out_ptr, value_scale_ptr, value_factor,
                        out_token_stride, num_tokens, num_heads, again, head, kv_head, live_m,
                        span == first_span, span == last_span, HEAD_SIZE, FUSED,
                    )  # fmt: skip
                    tl.debug_barrier()
