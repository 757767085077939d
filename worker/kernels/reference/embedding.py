"""Token embedding in plain torch."""

from torch import Tensor


def embedding(weight: Tensor, token_ids: Tensor) -> Tensor:
    """Looks up one row per token: `out[t] = weight[token_ids[t]]`.

    Args:
        weight: [vocab, hidden] float32.
        token_ids: [T] int32, each in [0, vocab).

    Returns:
        [T, hidden] float32.
    """
    return weight.index_select(0, token_ids)
