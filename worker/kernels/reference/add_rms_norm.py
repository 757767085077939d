"""Residual addition and the RMSNorm that follows it, in plain torch."""

from torch import Tensor

from worker.kernels.reference.add import add
from worker.kernels.reference.rms_norm import rms_norm


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds, and normalises the sum: `sum = x + y`, `out = rms_norm(sum, weight, eps)`.

    Args:
        x: [T, hidden] float32.
        y: [T, hidden] or [planes, T, hidden] float32; planes are added up in ascending order first.
        weight: [hidden] float32.
        eps: Added to the mean square, in float32.

    Returns:
        The sum and its norm, each [T, hidden] float32.
    """
    total = add(x, y)
    return total, rms_norm(total, weight, eps)
