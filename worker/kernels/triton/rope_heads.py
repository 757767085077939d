"""The kernel of `rope_store`: a token's heads turned, stored, rounded. Knows no launch and no sizes."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _load_heads(  # type: ignore[no-untyped-def]
    x_ptr, token_stride, plane_stride, token, lane, mask, PLANES: tl.constexpr
):
    """Heads of a token, [BLOCK_HEADS, BLOCK_D] float32: planes added in ascending order."""
    x_ptr += token * token_stride
    total = tl.load(x_ptr + lane, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(PLANES - 1):
        x_ptr += plane_stride
        total += tl.load(x_ptr + lane, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _turn(x, cos, sin, BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Turns the pairs (2i, 2i + 1) of each head; cos and sin are [1, BLOCK_D / 2]."""
    even, odd = tl.split(tl.reshape(x, [BLOCK_HEADS, BLOCK_D // 2, 2]))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, [BLOCK_HEADS, BLOCK_D])


@triton.jit
def _to_fp8_bits(x):  # type: ignore[no-untyped-def]
    """float32 to the bits of the nearest float8_e4m3fn, ties to even; saturates at 448, NaN stays NaN.

    By integers, since not every target has the instruction. Below 2^-6 float8 counts in steps of 2^-9: adding
    2^23 leaves that count in the last bits. Above, 20 bits of the fraction are rounded off and the exponent's
    bias goes from 127 to 7.
    """
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (size * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, small, normal)
    # NaN is what is unlike itself.
    code = tl.where(x == x, code, 0x7F)
    return (code | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def _store_heads(  # type: ignore[no-untyped-def]
    x, cache_ptr, scale_ptr, slot, head, d, mask,
    block_stride, slot_stride, head_stride, dim_stride,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Writes heads of a token into its slot, in the cache's dtype."""
    cache_ptr += slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    place = head[:, None] * head_stride + d[None, :] * dim_stride
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + head, mask=head < NUM_HEADS, other=1.0)
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if FP8:
        tl.store(cache_ptr + place, _to_fp8_bits(x), mask=mask)
    else:
        tl.store(cache_ptr + place, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def rope_store_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    position_ptr,
    slot_mapping_ptr,
    cos_ptr,
    sin_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    q_token_stride,
    k_token_stride,
    v_token_stride,
    q_plane_stride,
    k_plane_stride,
    v_plane_stride,
    out_token_stride,
    cos_stride,
    sin_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    key_dim_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    value_dim_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PLANES: tl.constexpr,
    FP8: tl.constexpr,
):
    """One program per (token, section): `BLOCK_HEADS` heads of q, of k or of v; see `rope_store`."""
    token = tl.program_id(0).to(tl.int64)
    section = tl.program_id(1)
    q_sections: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    kv_sections: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    d = tl.arange(0, BLOCK_D)
    inside = (d < HEAD_SIZE)[None, :]
    pair = tl.arange(0, BLOCK_D // 2)[None, :]
    position = tl.load(position_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * cos_stride + pair, mask=pair < HEAD_SIZE // 2, other=0.0)
    sin = tl.load(sin_ptr + position * sin_stride + pair, mask=pair < HEAD_SIZE // 2, other=0.0)
    if section < q_sections:
        head = section * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = (head < NUM_HEADS)[:, None] & inside
        lane = head[:, None] * HEAD_SIZE + d[None, :]
        q = _load_heads(q_ptr, q_token_stride, q_plane_stride, token, lane, mask, PLANES)
        turned = _turn(q, cos, sin, BLOCK_HEADS, BLOCK_D).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * out_token_stride + lane, turned, mask=mask)
    else:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:
            section -= q_sections
            head = section % kv_sections * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            mask = (head < NUM_KV_HEADS)[:, None] & inside
            lane = head[:, None] * HEAD_SIZE + d[None, :]
            if section < kv_sections:
                k = _load_heads(k_ptr, k_token_stride, k_plane_stride, token, lane, mask, PLANES)
                _store_heads(
                    _turn(k, cos, sin, BLOCK_HEADS, BLOCK_D), key_ptr, key_scale_ptr, slot, head, d, mask,
                    key_block_stride, key_slot_stride, key_head_stride, key_dim_stride,
                    BLOCK_SIZE, NUM_KV_HEADS, FP8,
                )  # fmt: skip
            else:
                v = _load_heads(v_ptr, v_token_stride, v_plane_stride, token, lane, mask, PLANES)
                _store_heads(
                    v, value_ptr, value_scale_ptr, slot, head, d, mask,
                    value_block_stride, value_slot_stride, value_head_stride, value_dim_stride,
                    BLOCK_SIZE, NUM_KV_HEADS, FP8,
                )  # fmt: skip
