"""The weights of one model in the forms that plans want them in. Knows no model, no graph and no file."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker.model.weights.quantised import QuantisedMatrix

if TYPE_CHECKING:
    from pagecast_native import PackedMatrix


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
        weights: Contiguous tensors, or quantised matrices. Two names of one object stand for one weight (a
            tied head).

    Attributes:
        tensors: By name: tensors as they were given, or rows of a stack. Quantised matrices, and after
            `release_plain` packed ones, are there as their shape only, on the device `meta`: graphs can be
            traced with them.
    """

    def __init__(self, weights: Mapping[str, Tensor | QuantisedMatrix]) -> None:
        first_names: dict[int, str] = {}
        self._one_name = {name: first_names.setdefault(id(weight), name) for name, weight in weights.items()}
        self._quantised: dict[str, QuantisedMatrix] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if (one_name := self._one_name[name]) != name:
                self.tensors[name] = self.tensors[one_name]
            elif isinstance(weight, QuantisedMatrix):
                self._quantised[name] = weight
                self.tensors[name] = torch.empty(weight.shape, device="meta")
            else:
                self.tensors[name] = weight
        self._stacked: dict[tuple[str, ...], Tensor] = {}
        self._matrices: dict[tuple[str, ...], Tensor | QuantisedMatrix] = {}
        self._packed: dict[tuple[str, ...], PackedMatrix] = {}

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

    def packed(self, parts: tuple[str, ...]) -> "PackedMatrix":
        """The parts stacked by rows and packed in panels for native kernels.

        Args:
            parts: Names of float32 matrices on the CPU, at least one.

        Raises:
            KeyError: A name is unknown.
            ValueError: A part is no matrix, or the parts are of different widths.
            RuntimeError: A part's plain copy was released, and this stack was not packed before.
        """
        # Only those who run native kernels have this module.
        from pagecast_native import PackedMatrix  # noqa: PLC0415

        key = self._key(parts)
        if key not in self._packed:
            tensors = self._plain(parts)
            for name, tensor in zip(parts, tensors, strict=True):
                if tensor.dim() != 2:
                    raise ValueError(f"{name} has {tensor.dim()} dimensions, a matrix is packed")
            self._packed[key] = PackedMatrix([tensor.numpy() for tensor in tensors])
        return self._packed[key]

    @property
    def packed_bytes(self) -> int:
        """Size of all that was packed."""
        return sum(matrix.num_bytes for matrix in self._packed.values())

    def release_plain(self) -> None:
        """Lets go of the plain copy of every matrix that was packed, alone or in a stack, and of all stacks.

        Shapes stay, as meta tensors: graphs can still be traced and what was packed is still found, but
        `stacked` refuses these names. Memory returns when nobody else holds the tensors.
        """
        released = {name for key in self._packed for name in key}
        self._stacked.clear()
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
            if self.tensors[name].is_meta:
                raise RuntimeError(f"{name}: only its packed form is left, its plain copy was released")
        return [self.tensors[name] for name in parts]

    def _multiplied(self, name: str) -> Tensor:
        """A part in the dtype that it shares with parts of other dtypes."""
        quantised = self._quantised.get(name)
        plain = self._plain((name,))[0] if quantised is None else quantised.dequantise()
        return plain.to(product_dtype(plain.device))


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
