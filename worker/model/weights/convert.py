"""What a tensor of a GGUF file becomes in memory. Knows formats of numbers, no model.

Block formats are decoded by the `gguf` package; those that kernels multiply as they are stay quantised.
"""

from typing import Final, Literal

import numpy as np
import torch
from gguf import GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from worker.model.config import ModelFileError
from worker.model.weights.quantised import QuantisedMatrix, QuantKind
from worker.model.weights.store import product_dtype

WeightFormat = Literal["file", "float32", "float16", "bfloat16"]
"""What matrices are kept as; `file`: as the file has them, as far as kernels can multiply that."""

_CAST: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_QUANTISED: Final[dict[GGMLQuantizationType, QuantKind]] = {
    GGMLQuantizationType.Q8_0: "q8_0",
    GGMLQuantizationType.Q4_0: "q4_0",
    GGMLQuantizationType.Q4_1: "q4_1",
}
_FLOATS: Final = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def convert(source: ReaderTensor, weights: WeightFormat, device: torch.device) -> Tensor | QuantisedMatrix:
    """One tensor on its device, in memory of its own.

    Vectors, which norms and rope read, are always float32. Of matrices `file` keeps Q8_0, Q4_0 and Q4_1
    quantised, F32 and F16 as they are, and BF16 where the device multiplies it (`product_dtype`); other
    formats are dequantised to `product_dtype`.

    Args:
        source: Of the file.
        weights: What matrices are kept as.
        device: Where to.

    Returns:
        Row-major, matrices [out, in].

    Raises:
        ModelFileError: The format can't be decoded, or a number is too large for float16; names the tensor.
    """
    kind = GGMLQuantizationType(source.tensor_type)
    if len(source.shape) != 2 or weights == "float32":
        return _decoded(source, kind).to(device)
    if weights != "file":
        return _cast(source.name, _decoded(source, kind), _CAST[weights]).to(device)
    if kind in _QUANTISED:
        return QuantisedMatrix.from_gguf(_QUANTISED[kind], np.array(source.data)).to(device)
    dtype = _FLOATS.get(kind, torch.bfloat16)
    return _decoded(source, kind).to(product_dtype(device) if dtype == torch.bfloat16 else dtype).to(device)


def is_dequantised(source: ReaderTensor, weights: WeightFormat) -> bool:
    """Whether `file` was asked for and `convert` decodes a block format, since no kernel multiplies it."""
    kind = GGMLQuantizationType(source.tensor_type)
    return weights == "file" and len(source.shape) == 2 and not (kind in _QUANTISED or kind in _FLOATS)


def _decoded(source: ReaderTensor, kind: GGMLQuantizationType) -> Tensor:
    try:
        values = dequantize(source.data, kind)
    except (NotImplementedError, ValueError) as error:
        raise ModelFileError(f"tensor {source.name}: type {kind.name} cannot be dequantised") from error
    # A copy: float32 tensors come as views of the mapped file.
    return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))


def _cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    cast = values.to(dtype)
    if dtype == torch.float16 and not torch.equal(cast.isinf(), values.isinf()):
        raise ModelFileError(f"tensor {name}: a weight is over {torch.finfo(dtype).max}, float16's largest")
    return cast
