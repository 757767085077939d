"""Rotary position embedding and the KV store in plain torch."""

from torch import Tensor

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
) -> Tensor:
    """Turns q and k by their token's position and stores k and v in their slot, as `rope` and `store_kv` do.

    Args:
        q: [T, num_heads * head_size] float32.
        k: [T, num_kv_heads * head_size] float32.
        v: [T, num_kv_heads * head_size] float32.
        position: [T] int32.
        slot_mapping: [T] int64, no slot twice.
        cos: [max_context, head_size / 2] float32.
        sin: [max_context, head_size / 2] float32.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size] float32, any strides; written.
        value_cache: As `key_cache`, maybe of other strides; written.

    Returns:
        The turned q, [T, num_heads * head_size] float32.
    """
    store_kv(rope(k, position, cos, sin), v, slot_mapping, key_cache, value_cache)
    return rope(q, position, cos, sin)
