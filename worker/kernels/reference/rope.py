"""Rotary position embedding in plain torch."""

import torch
from torch import Tensor


def rope(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each head by its token's position.

    Pairs are interleaved, (2i, 2i+1), as GGUF files of Llama models order the rows of Q and K:
    `out[2i] = x[2i] cos(p f_i) - x[2i+1] sin(p f_i)`, `out[2i+1] = x[2i] sin(p f_i) + x[2i+1] cos(p f_i)`.

    Source: Su et al., "RoFormer" (2021), arXiv:2104.09864.

    Args:
        x: [T, heads * head_size] float32.
        position: [T] int32.
        cos: [max_context, head_size / 2] float32.
        sin: [max_context, head_size / 2] float32.

    Returns:
        [T, heads * head_size] float32.
    """
    token_cos = cos.index_select(0, position).unsqueeze(1)
    token_sin = sin.index_select(0, position).unsqueeze(1)
    half = cos.shape[1]
    pairs = x.view(-1, x.shape[1] // (2 * half), half, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * token_cos - odd * token_sin, even * token_sin + odd * token_cos), dim=-1)
    return turned.flatten(1)
