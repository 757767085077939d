"""RMSNorm in plain torch."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scales each row by the inverse root of its mean square: `out = x / sqrt(mean(x^2) + eps) * weight`.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), arXiv:1910.07467.

    Args:
        x: [T, hidden] float32.
        weight: [hidden] float32.
        eps: Added to the mean square, in float32.

    Returns:
        [T, hidden] float32.
    """
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(mean_square + eps) * weight
