"""The KV store in plain torch."""

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Stores each token's k and v in its slot: `cache[slot // block_size, slot % block_size] = x[t]`.

    Args:
        k: [T, num_kv_heads * head_size] float32.
        v: As `k`.
        slot_mapping: [T] int64, no slot twice.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size] float32, any strides; written.
        value_cache: As `key_cache`, maybe of other strides; written.
    """
    _, block_size, num_kv_heads, head_size = key_cache.shape
    place = slot_mapping // block_size, slot_mapping % block_size
    key_cache[place] = k.view(-1, num_kv_heads, head_size)
    value_cache[place] = v.view(-1, num_kv_heads, head_size)
