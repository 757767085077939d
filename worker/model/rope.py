"""The table of rotation angles of a model: fixed once, looked up by position."""

import torch
from torch import Tensor


def rope_tables(
    *, head_size: int, theta: float, max_context_tokens: int, frequency_factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `p * f_i` with `f_i = theta^(-2i / head_size) / factor_i`, computed in float64.

    Source: Su et al., "RoFormer" (2021), arXiv:2104.09864; the factors are those that GGUF files of
    Llama 3.1 and later carry as `rope_freqs.weight`.

    Args:
        head_size: Even.
        theta: Base of the frequencies.
        max_context_tokens: Positions in the table.
        frequency_factors: [head_size / 2], or None for all ones.

    Returns:
        cos and sin, each [max_context_tokens, head_size / 2] float32.

    Raises:
        ValueError: `head_size` is odd, or `frequency_factors` has another shape.
    """
    if head_size % 2:
        raise ValueError(f"head_size={head_size} is odd")
    frequency = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    if frequency_factors is not None:
        if frequency_factors.shape != frequency.shape:
            raise ValueError(
                f"rope_freqs.weight has shape {tuple(frequency_factors.shape)}, not {tuple(frequency.shape)}"
            )
        frequency = frequency / frequency_factors.to(torch.float64)
    angle = torch.arange(max_context_tokens, dtype=torch.float64).unsqueeze(1) * frequency
    return angle.cos().to(torch.float32), angle.sin().to(torch.float32)
