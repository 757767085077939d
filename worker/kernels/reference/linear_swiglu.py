"""Gate and up projection with SwiGLU in plain torch."""

import torch
from torch import Tensor

from worker.kernels.quantised import QuantisedMatrix
from worker.kernels.reference.linear import linear
from worker.kernels.reference.swiglu import swiglu


def linear_swiglu(
    x: Tensor, gate_up: Tensor | QuantisedMatrix, *, compute: torch.dtype | None = None
) -> Tensor:
    """Projects by two stacked weights and gates: `out = silu(x @ gate.T) * (x @ up.T)`.

    Args:
        x: [T, K], a float dtype.
        gate_up: [2 * intermediate, K], as the weight of `linear`; the first half gates.
        compute: As of `linear`.

    Returns:
        [T, intermediate], of the dtype that `linear` gives.

    Raises:
        ValueError: `gate_up` has an odd number of rows.
    """
    if gate_up.shape[0] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[0]} rows, which are no two halves")
    gate, up = linear(x, gate_up, compute=compute).chunk(2, dim=1)
    return swiglu(gate, up)
