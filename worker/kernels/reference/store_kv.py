"""The KV store in plain torch."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest float8_e4m3fn; what is beyond is stored as this."""


def round_to_int8(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors in eight bits: `scale = a / 127` and `element = round(x * (127 / a))`, halves to even.

    a is the largest |x| of a vector; where 127 / a is not finite, as a is 0 or almost, elements are 0. Where
    an x is not finite the scale is NaN and elements are 0.

    Args:
        heads: [T, num_kv_heads, head_size] float32.

    Returns:
        [T, num_kv_heads, head_size] int8, and [T, num_kv_heads] float32.
    """
    largest = heads.abs().amax(-1)
    is_finite = heads.isfinite().all(-1)
    # A scalar over a tensor is rounded twice: torch multiplies by a reciprocal.
    factor = torch.full_like(largest, 127.0) / largest
    factor = torch.where(factor.isfinite() & is_finite, factor, 0.0)
    elements = torch.where(is_finite[..., None], heads * factor[..., None], 0.0).round().to(torch.int8)
    return elements, torch.where(is_finite, largest / 127.0, torch.nan)


def store_kv(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Stores each token's k and v in its slot: `cache[slot // block_size, slot % block_size] = x[t]`.

    Args:
        k: [T, num_kv_heads * head_size] float32.
        v: As `k`.
        slot_mapping: [T] int64, no slot twice; of a negative one nothing is stored.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size] of any float dtype, or int8, any strides;
            written. Values are rounded to it; in float8_e4m3fn what is too large becomes the largest.
        value_cache: As `key_cache`, maybe of other strides; written.
        key_scale: [num_kv_heads] float32, or None: keys are stored divided by it. Of an int8 cache
            [num_blocks, block_size, num_kv_heads] float32, any strides; written, see `round_to_int8`.
        value_scale: As `key_scale`, of values.

    Raises:
        ValueError: An int8 cache comes without scales.
    """
    _, block_size, num_kv_heads, head_size = key_cache.shape
    keep = slot_mapping >= 0
    if not keep.all():
        k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
    place = slot_mapping // block_size, slot_mapping % block_size
    for x, cache, scale in ((k, key_cache, key_scale), (v, value_cache, value_scale)):
        heads = x.view(-1, num_kv_heads, head_size)
        if cache.dtype == torch.int8:
            if scale is None:
                raise ValueError("an int8 cache needs key_scale and value_scale, which are written")
            cache[place], scale[place] = round_to_int8(heads)
            continue
        if scale is not None:
            heads = heads / scale[:, None]
        if cache.dtype == FP8:
            # torch has no indexed writes of float8: its bytes are written.
            cache.view(torch.uint8)[place] = heads.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        else:
            cache[place] = heads.to(cache.dtype)
