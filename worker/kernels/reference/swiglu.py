"""SwiGLU in plain torch."""

import torch
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Gates one projection by the other: `out = gate / (1 + exp(-gate)) * up`.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), arXiv:2002.05202.

    Written out because `torch.nn.functional.silu` gives the tail of a buffer, what is left after
    whole vectors, other bits than its body: an element's bits would depend on the number of rows.

    Args:
        gate: [T, intermediate] float32.
        up: [T, intermediate] float32.

    Returns:
        [T, intermediate] float32.
    """
    return gate / (torch.exp(-gate) + 1.0) * up
