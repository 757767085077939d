"""Matrix product with a weight in plain torch."""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from worker.kernels.quantised import QuantisedMatrix

TILE_ROWS = 16
"""Rows of every matrix product. The BLAS picks its order of additions by the shape of a call, so one
shape for all calls gives a row the same bits in any batch; measured: at N=576, K=1536 the bits of a row
differ between calls of 16 and of 64 rows."""


def linear(
    x: Tensor,
    weight: Tensor | QuantisedMatrix,
    *,
    compute: torch.dtype | None = None,
    planes: int | None = None,
) -> Tensor:
    """Multiplies rows by a weight: `out = x @ weight.T`, in tiles of `TILE_ROWS` rows, the last zero padded.

    Where x and weight are both float32 or both float64, products are of that dtype. Else x, and quantised
    weights, are first rounded to the compute dtype, a plain weight's own or `compute`, and multiplied in
    float32.

    Args:
        x: [T, K], a float dtype.
        weight: [N, K], a float dtype, contiguous; or quantised.
        compute: What quantised products are rounded to; bfloat16 if it is None.
        planes: In how many equal parts K is multiplied, each a plane of the result; None for one without a
            dimension of its own.

    Returns:
        [T, N], or [planes, T, N], of x's dtype where nothing is rounded, else float32.

    Raises:
        ValueError: K is no multiple of `planes`.
    """
    if isinstance(weight, QuantisedMatrix):
        rounded = compute or torch.bfloat16
        x, weight = x.to(rounded).float(), weight.dequantise().to(rounded).float()
    elif x.dtype != weight.dtype or x.dtype.itemsize < 4:
        x, weight = x.to(weight.dtype).float(), weight.float()
    if planes is None:
        return _tiles(x, weight)
    if x.shape[1] % planes:
        raise ValueError(f"planes={planes}: x has rows of {x.shape[1]}, which are not as many equal parts")
    parts = zip(x.chunk(planes, dim=1), weight.chunk(planes, dim=1), strict=True)
    return torch.stack([_tiles(part.contiguous(), columns.contiguous()) for part, columns in parts])


def _tiles(x: Tensor, weight: Tensor) -> Tensor:
    num_rows = x.shape[0]
    if not num_rows:
        return x.new_empty(0, weight.shape[0])
    padded = F.pad(x, (0, 0, 0, -num_rows % TILE_ROWS)) if num_rows % TILE_ROWS else x.contiguous()
    tiles = [F.linear(tile, weight) for tile in torch.split(padded, TILE_ROWS)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:num_rows]
