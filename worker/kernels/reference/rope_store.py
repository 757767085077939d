"""Rotary position embedding and the KV store in plain torch."""

from torch import Tensor

from worker.kernels.reference.add import sum_planes
from worker.kernels.reference.rope import rope
from worker.kernels.reference.store_kv import store_kv


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Turns q and k by their token's position and stores k and v in their slot, as `rope` and `store_kv` do.

    Args:
        q: [T, num_heads * head_size] float32, or planes [P, T, num_heads * head_size] of it, which are added
            in ascending order.
        k: [T, num_kv_heads * head_size] float32, or planes.
        v: As `k`.
        position: [T] int32.
        slot_mapping: [T] int64, no slot twice; of a negative one nothing is stored.
        cos: [max_context, head_size / 2] float32.
        sin: [max_context, head_size / 2] float32.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size] of any float dtype, or int8, any strides;
            written.
        value_cache: As `key_cache`, maybe of other strides; written.
        key_scale: [num_kv_heads] float32, or None: keys are stored divided by it. Of an int8 cache
            [num_blocks, block_size, num_kv_heads] float32; written.
        value_scale: As `key_scale`, of values.

    Returns:
        The turned q, [T, num_heads * head_size] float32.
    """
    q, k, v = (sum_planes(x) for x in (q, k, v))
    store_kv(
        rope(k, position, cos, sin),
        v,
        slot_mapping,
        key_cache,
        value_cache,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return rope(q, position, cos, sin)
