"""Row selection in plain torch."""

from torch import Tensor


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Keeps the rows that logits are wanted for: `out[l] = x[index[l]]`.

    Args:
        x: [T, hidden] float32.
        index: [L] int32, each in [0, T).

    Returns:
        [L, hidden] float32.
    """
    return x.index_select(0, index)
