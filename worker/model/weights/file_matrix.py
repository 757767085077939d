"""A matrix that stays in its mapped file until it is packed for native kernels. Knows formats, no model.

Block formats are named as GGUF names them and are decoded by the `gguf` package.
"""

import mmap
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from worker.model.config import ModelFileError

PackedKind = Literal["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"]
"""Formats that native kernels multiply, as GGUF names them."""

PACKED_KINDS: Final[tuple[PackedKind, ...]] = get_args(PackedKind)
_DTYPES: Final = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class FileMatrix:
    """A matrix [N, K] as it lies in a file, and what it is to be packed as.

    Attributes:
        name: Of the tensor, for errors.
        kind: How it lies: a GGUF type in lower case, one that the `gguf` package decodes.
        shape: (N, K).
        raw: [N, bytes of a row] uint8, read-only, a view of the mapped file, whose pages are
            read when it is packed.
        packed_as: `kind`, or one of f32, f16 and bf16, which it is converted to while it is packed; f16 and
            bf16 round to nearest even.

    Raises:
        ValueError: `raw` is not of this kind and shape, or there is no such packing.
    """

    name: str
    kind: str
    shape: tuple[int, int]
    raw: npt.NDArray[np.uint8]
    packed_as: PackedKind

    def __post_init__(self) -> None:
        if self.packed_as not in PACKED_KINDS or (
            self.packed_as != self.kind and self.packed_as not in _DTYPES
        ):
            raise ValueError(f"packed_as={self.packed_as!r}: {self.kind} is packed as it lies or as a float")
        block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind.upper()]]
        num_rows, width = self.shape
        expected = (num_rows, width // block * num_bytes)
        if width % block or self.raw.shape != expected or self.raw.dtype != np.uint8:
            raise ValueError(
                f"raw is {list(self.raw.shape)} {self.raw.dtype}, {self.kind} {list(self.shape)} has "
                f"{list(expected)} uint8"
            )

    @property
    def format(self) -> str:
        """What it is kept as once it is packed: `q4_1`, `bfloat16`."""
        dtype = _DTYPES.get(self.packed_as)
        return self.packed_as if dtype is None else str(dtype).removeprefix("torch.")

    def packable(self) -> tuple[PackedKind, npt.NDArray[np.uint8]]:
        """The kind and the bytes [N, bytes of a row] that are packed: the file's, or those of a conversion.

        Raises:
            ModelFileError: A number is too large for float16; names the tensor.
        """
        if self.packed_as == self.kind:
            return self.packed_as, self.raw
        values = self.dequantise()
        cast = values.to(_DTYPES[self.packed_as])
        if self.packed_as == "f16" and not torch.equal(cast.isinf(), values.isinf()):
            largest = torch.finfo(torch.float16).max
            raise ModelFileError(f"tensor {self.name}: a weight is over {largest}, float16's largest")
        return self.packed_as, cast.view(torch.uint8).numpy()

    def dequantise(self) -> Tensor:
        """All weights, [N, K] float32, in memory of their own.

        Raises:
            ModelFileError: The `gguf` package does not decode this kind; names the tensor.
        """
        return decoded(self.name, GGMLQuantizationType[self.kind.upper()], self.raw)

    def forget(self) -> None:
        """Lets the system take the file's pages back; a later look reads the file again.

        All of them: where it keeps large pieces of a file, the system maps more than was looked at.
        """
        owner: object = self.raw
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            owner.madvise(mmap.MADV_DONTNEED)


def decoded(name: str, kind: GGMLQuantizationType, data: npt.NDArray[np.generic]) -> Tensor:
    """A tensor's numbers as float32, in memory of their own.

    Args:
        name: Of the tensor, for the error.
        kind: How it lies.
        data: Of the file: bytes, or numbers where it has such.

    Raises:
        ModelFileError: The `gguf` package does not decode this kind; names the tensor.
    """
    try:
        values = dequantize(data, kind)
    except (NotImplementedError, ValueError) as error:
        raise ModelFileError(f"tensor {name}: type {kind.name} cannot be dequantised") from error
    # A copy: float32 tensors come as views of the mapped file.
    return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
