"""Residual addition in plain torch."""

import torch
from torch import Tensor


def add(x: Tensor, y: Tensor) -> Tensor:
    """Adds two equal shapes: `out = x + y`.

    Args:
        x: [T, hidden] float32.
        y: [T, hidden] float32.

    Returns:
        [T, hidden] float32.
    """
    return torch.add(x, y)
