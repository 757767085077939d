"""A range of columns in plain torch."""

from torch import Tensor


def columns(x: Tensor, start: int, end: int) -> Tensor:
    """Copies the columns from `start` to before `end`: `out = x[:, start:end]`.

    Args:
        x: [T, width] float32.
        start: From 0.
        end: Up to width, not below `start`.

    Returns:
        [T, end - start] float32.

    Raises:
        ValueError: The range is not within the width.
    """
    if not 0 <= start <= end <= x.shape[1]:
        raise ValueError(f"columns {start}..{end} are not in 0..{x.shape[1]}")
    return x[:, start:end].clone()
