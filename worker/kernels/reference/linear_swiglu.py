"""Gate and up projection with SwiGLU in plain torch."""

from torch import Tensor

from worker.kernels.reference.linear import linear
from worker.kernels.reference.swiglu import swiglu


def linear_swiglu(x: Tensor, gate_up: Tensor) -> Tensor:
    """Projects by two stacked weights and gates: `out = silu(x @ gate.T) * (x @ up.T)`.

    Args:
        x: [T, K] float32.
        gate_up: [2 * intermediate, K] float32, contiguous; the first half gates.

    Returns:
        [T, intermediate] float32.

    Raises:
        ValueError: `gate_up` has an odd number of rows.
    """
    if gate_up.shape[0] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[0]} rows, which are no two halves")
    gate, up = linear(x, gate_up).chunk(2, dim=1)
    return swiglu(gate, up)
