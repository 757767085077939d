"""Token embedding in plain torch."""

from torch import Tensor

from worker.kernels.quantised import QuantisedMatrix


def embedding(weight: Tensor | QuantisedMatrix, token_ids: Tensor) -> Tensor:
    """Looks up one row per token: `out[t] = weight[token_ids[t]]`.

    Args:
        weight: [vocab, hidden], a float dtype or quantised.
        token_ids: [T] int32, each in [0, vocab).

    Returns:
        [T, hidden] float32, of a float64 table float64.
    """
    if isinstance(weight, QuantisedMatrix):
        return weight.take(token_ids).dequantise()
    rows = weight.index_select(0, token_ids)
    return rows if rows.dtype.itemsize >= 4 else rows.float()
