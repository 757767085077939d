"""The weights of one model in the forms that plans want them in. Knows no model, graph or file format."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from worker.model.weights.file_matrix import FileMatrix
from worker.model.weights.quantised import QuantisedMatrix

if TYPE_CHECKING:
    from pagecast_native import GgufPart, PackedMatrix

Activations = Literal["float32", "int8", "bfloat16"]
"""What native kernels multiply with quantised weights: as it is, or rounded to eight bits in groups of 32."""


def product_dtype(device: torch.device) -> torch.dtype:
    """What weights are multiplied in that name no dtype of their own.

    bfloat16, which has float32's range. On a CPU float32: Triton's interpreter gives no products of bfloat16.
    """
    return torch.float32 if device.type == "cpu" else torch.bfloat16


class WeightStore:
    """Weights by name, and what was made of them, each made once.

    A stack is several matrices of equal width, one below the other, named by its parts. Parts become rows of
    the last stack that was made of them, so that nothing is held twice. Native kernels want matrices packed
    in panels; a model that only they run needs no plain copy of those, see `release_plain`.

    Args:
        weights: Contiguous tensors, quantised matrices, or matrices in a file that are to be packed. Two
            names of one object stand for one weight (a tied head).

    Attributes:
        tensors: By name: tensors as they were given, or rows of a stack. Matrices that are quantised or in a
            file, and after `release_plain` packed ones, are there as their shape only, on the device `meta`:
            graphs can be traced with them.
        widened: Names of each stack that had to be packed as float32, since its parts are of several formats.
    """

    def __init__(self, weights: Mapping[str, Tensor | QuantisedMatrix | FileMatrix]) -> None:
        first_names: dict[int, str] = {}
        self._one_name = {name: first_names.setdefault(id(weight), name) for name, weight in weights.items()}
        self._quantised: dict[str, QuantisedMatrix] = {}
        self._files: dict[str, FileMatrix] = {}
        self._formats: dict[str, str] = {}  # of those in a file, also once they are released
        self.tensors: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if (one_name := self._one_name[name]) != name:
                self.tensors[name] = self.tensors[one_name]
            elif isinstance(weight, QuantisedMatrix):
                self._quantised[name] = weight
                self.tensors[name] = torch.empty(weight.shape, device="meta")
            elif isinstance(weight, FileMatrix):
                self._files[name], self._formats[name] = weight, weight.format
                self.tensors[name] = torch.empty(weight.shape, device="meta")
            else:
                self.tensors[name] = weight
        self._stacked: dict[tuple[str, ...], Tensor] = {}
        self._matrices: dict[tuple[str, ...], Tensor | QuantisedMatrix] = {}
        self._packed: dict[tuple[tuple[str, ...], bool], PackedMatrix] = {}
        self.widened: tuple[tuple[str, ...], ...] = ()

    def matrix(self, parts: tuple[str, ...]) -> Tensor | QuantisedMatrix:
        """The parts stacked by rows in the form that is multiplied; of one part the weight itself.

        Args:
            parts: Names, at least one, of tensors or quantised matrices.

        Returns:
            [sum of rows, K], contiguous: of parts of one dtype, or quantised alike, the same; of others
            `product_dtype` of their device.

        Raises:
            KeyError: A name is unknown.
            RuntimeError: A part's plain copy was released.
        """
        key = self._key(parts)
        quantised = [self._quantised[name] for name in key if name in self._quantised]
        if not quantised and len({self.tensors[name].dtype for name in key}) == 1:
            return self.stacked(parts)
        if len(key) == 1:
            return quantised[0]
        if key not in self._matrices:
            if len(quantised) == len(key) and len({part.kind for part in quantised}) == 1:
                stack = QuantisedMatrix.stack(quantised)
                self._quantised |= _rows_of(stack, {name: self._quantised[name].shape[0] for name in key})
                self._matrices[key] = stack
            else:
                self._matrices[key] = torch.cat([self._multiplied(name) for name in key])
        return self._matrices[key]

    def stacked(self, parts: tuple[str, ...]) -> Tensor:
        """The parts stacked by rows; of one part the tensor itself, of any shape.

        Args:
            parts: Names of tensors, at least one.

        Returns:
            [sum of rows, K], of the parts' dtype, contiguous.

        Raises:
            KeyError: A name is unknown.
            RuntimeError: A part's plain copy was released, or there never was one: it is quantised.
        """
        tensors = self._plain(parts)
        if len(tensors) == 1:
            return tensors[0]
        key = self._key(parts)
        if key not in self._stacked:
            self._stacked[key] = stack = torch.cat(tensors)
            start = 0
            rows = {}
            for name, tensor in zip(key, tensors, strict=True):
                rows[name] = stack[start : start + tensor.shape[0]]
                start += tensor.shape[0]
            self._replace(rows)
        return self._stacked[key]

    def packed(self, parts: tuple[str, ...], *, wants_one_format: bool = False) -> "PackedMatrix":
        """The parts stacked by rows and packed in panels for native kernels.

        What lies in a file is read here, and its pages are given back. Parts of several formats keep them
        where that can be: if each but the last is whole panels, and the caller takes several. Else they are
        packed as float32, which loses nothing (`widened`).

        Args:
            parts: Names, at least one, of float32 matrices on the CPU or of matrices in a file.
            wants_one_format: Whether the parts are read side by side, as gate and up are.

        Raises:
            KeyError: A name is unknown.
            ValueError: A part is no matrix, or the parts are of different widths.
            RuntimeError: A part's plain copy was released, and this stack was not packed before.
            ModelFileError: A part is to be float16, and a number is too large for that.
        """
        # Only those who run native kernels have this module.
        from pagecast_native import LANES, PackedMatrix  # noqa: PLC0415

        key = self._key(parts)
        for name in parts:
            if self.tensors[name].dim() != 2:
                raise ValueError(f"{name} has {self.tensors[name].dim()} dimensions, a matrix is packed")
        is_whole = all(self.tensors[name].shape[0] % LANES == 0 for name in key[:-1])
        is_widened = (wants_one_format or not is_whole) and len(
            {self._formats.get(name, "float32") for name in key}
        ) > 1
        if (key, is_widened) in self._packed:
            return self._packed[key, is_widened]
        files = {name: self._files[name] for name in key if name in self._files}
        if is_widened:
            files = {name: replace(matrix, packed_as="f32") for name, matrix in files.items()}
        packed = PackedMatrix(
            [
                _part_of(files[one_name]) if one_name in files else self._plain((name,))[0].numpy()
                for name, one_name in zip(parts, key, strict=True)
            ]
        )
        self._packed[key, is_widened] = packed
        for matrix in files.values():
            matrix.forget()
        if is_widened:
            self.widened += (parts,)
        return packed

    @property
    def packed_bytes(self) -> int:
        """Size of all that was packed."""
        return sum(matrix.num_bytes for matrix in self._packed.values())

    def release_plain(self) -> None:
        """Lets go of every matrix that was packed, alone or in a stack, and of all stacks; panels stay.

        Shapes stay, as meta tensors: graphs can still be traced and what was packed is still found, but
        `stacked` refuses these names. Memory returns, and a file is closed, when nobody else holds them.
        """
        released = {name for key, _ in self._packed for name in key}
        self._stacked.clear()
        self._files = {name: matrix for name, matrix in self._files.items() if name not in released}
        self._replace({name: self.tensors[name].to("meta") for name in released})

    def _replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts tensors in the place of weights, under all of their names."""
        for name, one_name in self._one_name.items():
            if one_name in tensors:
                self.tensors[name] = tensors[one_name]

    def _key(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self._one_name[name] for name in parts)

    def _plain(self, parts: tuple[str, ...]) -> list[Tensor]:
        for name in parts:
            if (quantised := self._quantised.get(self._one_name[name])) is not None:
                raise RuntimeError(
                    f"{name}: it is kept quantised as {quantised.kind}, there is no plain copy"
                )
            if (matrix := self._files.get(self._one_name[name])) is not None:
                raise RuntimeError(f"{name}: it lies in its file as {matrix.kind}, there is no plain copy")
            if self.tensors[name].is_meta:
                raise RuntimeError(f"{name}: only its packed form is left, its plain copy was released")
        return [self.tensors[name] for name in parts]

    def _multiplied(self, name: str) -> Tensor:
        """A part in the dtype that it shares with parts of other dtypes."""
        quantised = self._quantised.get(name)
        plain = self._plain((name,))[0] if quantised is None else quantised.dequantise()
        return plain.to(product_dtype(plain.device))


def _part_of(matrix: FileMatrix) -> "GgufPart":
    from pagecast_native import GgufPart  # noqa: PLC0415  as above

    kind, raw = matrix.packable()
    return GgufPart(kind=kind, data=raw)


def _rows_of(stack: QuantisedMatrix, num_rows: Mapping[str, int]) -> dict[str, QuantisedMatrix]:
    """The parts of a stack, as rows of it."""
    parts: dict[str, QuantisedMatrix] = {}
    start = 0
    for name, count in num_rows.items():
        own = slice(start, start + count)
        parts[name] = QuantisedMatrix(
            stack.kind,
            (count, stack.shape[1]),
            stack.quants[own],
            stack.scales[own],
            None if stack.mins is None else stack.mins[own],
        )
        start += count
    return parts
