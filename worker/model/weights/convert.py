"""What a tensor of a GGUF file becomes in memory. Knows formats of numbers, no model.

Block formats are decoded by the `gguf` package; those that kernels multiply as they are stay quantised. For
native kernels matrices stay in the mapped file until they are packed.
"""

from typing import Final, Literal

import numpy as np
import torch
from gguf import GGMLQuantizationType, ReaderTensor
from torch import Tensor

from worker.model.config import ModelFileError
from worker.model.weights.file_matrix import PACKED_KINDS, FileMatrix, PackedKind, decoded
from worker.model.weights.quantised import QuantisedMatrix, QuantKind
from worker.model.weights.store import product_dtype

WeightFormat = Literal["file", "float32", "float16", "bfloat16"]
"""What matrices are kept as; `file`: as the file has them, as far as kernels can multiply that."""

Multiplier = Literal["tensors", "panels"]
"""What multiplies matrices: operators over tensors, Triton's over quantised ones too; or native kernels over
panels, which are packed from the file."""

_CAST: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_PACKED_AS: Final[dict[str, PackedKind]] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
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


def mapped(source: ReaderTensor, weights: WeightFormat) -> Tensor | FileMatrix:
    """One tensor for native kernels: a vector as float32 in memory of its own, a matrix where it lies.

    Of matrices `file` keeps all of `PACKED_KINDS`; other formats are to be packed as bfloat16.

    Args:
        source: Of the file; a matrix holds on to its map.
        weights: What matrices are kept as.

    Raises:
        ModelFileError: The format can't be decoded; names the tensor.
    """
    kind = GGMLQuantizationType(source.tensor_type)
    if len(source.shape) != 2:
        return decoded(source.name, kind, source.data)
    name = kind.name.lower()
    packed_as: PackedKind
    if weights != "file":
        packed_as = _PACKED_AS[weights]
    else:
        packed_as = next((known for known in PACKED_KINDS if known == name), "bf16")
    if packed_as != name:
        decoded(source.name, kind, source.data[:1])  # refused here, not when it is packed
    num_rows = int(source.shape[1])
    raw = source.data.view(np.uint8).reshape(num_rows, -1)
    return FileMatrix(source.name, name, (num_rows, int(source.shape[0])), raw, packed_as)


def is_dequantised(source: ReaderTensor, weights: WeightFormat, multiplier: Multiplier = "tensors") -> bool:
    """Whether `file` was asked for and a block format is decoded, since no such kernel multiplies it."""
    if weights != "file" or len(source.shape) != 2:
        return False
    kind = GGMLQuantizationType(source.tensor_type)
    if multiplier == "panels":
        return kind.name.lower() not in PACKED_KINDS
    return not (kind in _QUANTISED or kind in _FLOATS)


def _decoded(source: ReaderTensor, kind: GGMLQuantizationType) -> Tensor:
    return decoded(source.name, kind, source.data)


def _cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    cast = values.to(dtype)
    if dtype == torch.float16 and not torch.equal(cast.isinf(), values.isinf()):
        raise ModelFileError(f"tensor {name}: a weight is over {torch.finfo(dtype).max}, float16's largest")
    return cast
