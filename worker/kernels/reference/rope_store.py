"""Rotary position embedding and the KV store in plain torch."""

import torch
from torch import Tensor


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


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
    """Rotates q and k by their token's position and stores k and v in their slot.

    Pairs are interleaved, (2i, 2i+1), as GGUF files of Llama models order the rows of Q and K:
    `out[2i] = x[2i] cos(p f_i) - x[2i+1] sin(p f_i)`, `out[2i+1] = x[2i] sin(p f_i) + x[2i+1] cos(p f_i)`.

    Source: Su et al., "RoFormer" (2021), arXiv:2104.09864.

    Args:
        q: [T, num_heads * head_size] float32.
        k: [T, num_kv_heads * head_size] float32.
        v: [T, num_kv_heads * head_size] float32.
        position: [T] int32.
        slot_mapping: [T] int64, no slot twice.
        cos: [max_context, head_size / 2] float32.
        sin: [max_context, head_size / 2] float32.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size] float32, any strides; written.
        value_cache: As `key_cache`; written.

    Returns:
        The rotated q, [T, num_heads * head_size] float32.
    """
    _, block_size, num_kv_heads, head_size = key_cache.shape
    token_cos = cos.index_select(0, position).unsqueeze(1)
    token_sin = sin.index_select(0, position).unsqueeze(1)
    block = slot_mapping // block_size
    offset = slot_mapping % block_size
    key_cache[block, offset] = _rotate(k.view(-1, num_kv_heads, head_size), token_cos, token_sin)
    value_cache[block, offset] = v.view(-1, num_kv_heads, head_size)
    return _rotate(q.view(q.shape[0], -1, head_size), token_cos, token_sin).flatten(1)
