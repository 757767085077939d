"""Residual addition in plain torch."""

import torch
from torch import Tensor


def add(x: Tensor, y: Tensor) -> Tensor:
    """Adds: `out = x + y`; planes of y are added up in ascending order first.

    Args:
        x: [T, hidden] float32.
        y: [T, hidden] or [planes, T, hidden] float32.

    Returns:
        [T, hidden] float32.
    """
    return torch.add(x, sum_planes(y))


def sum_planes(y: Tensor) -> Tensor:
    """The sum of a value's planes in ascending order; a value [T, W] is itself."""
    if y.dim() == 2:
        return y
    total = y[0]
    for plane in y[1:]:
        total = total + plane
    return total
