"""The weights of one model in the forms that plans want them in. Knows no model, no graph and no file."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pagecast_native import PackedMatrix


class WeightStore:
    """Tensors by name, and what was made of them, each made once.

    A stack is several matrices of equal width, one below the other, named by its parts. Native kernels want
    matrices packed in panels; a model that only they run needs no plain copy of those, see `release_plain`.

    Args:
        tensors: float32, contiguous. Two names of one tensor object stand for one weight (a tied head).

    Attributes:
        tensors: As given, by name; after `release_plain` packed matrices are on the device `meta`.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        first_names: dict[int, str] = {}
        self._one_name = {name: first_names.setdefault(id(tensor), name) for name, tensor in tensors.items()}
        self._stacked: dict[tuple[str, ...], Tensor] = {}
        self._packed: dict[tuple[str, ...], PackedMatrix] = {}

    def stacked(self, parts: tuple[str, ...]) -> Tensor:
        """The parts stacked by rows; of one part the tensor itself, of any shape.

        Args:
            parts: Names, at least one.

        Returns:
            [sum of rows, K] float32, contiguous.

        Raises:
            KeyError: A name is unknown.
            RuntimeError: A part's plain copy was released.
        """
        tensors = self._plain(parts)
        if len(tensors) == 1:
            return tensors[0]
        key = self._key(parts)
        if key not in self._stacked:
            self._stacked[key] = torch.cat(tensors)
        return self._stacked[key]

    def packed(self, parts: tuple[str, ...]) -> "PackedMatrix":
        """The parts stacked by rows and packed in panels for native kernels.

        Args:
            parts: Names of matrices on the CPU, at least one.

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
        twins = {name: self.tensors[name].to("meta") for name in released}
        for name, one_name in self._one_name.items():
            if one_name in twins:
                self.tensors[name] = twins[one_name]
        self._stacked.clear()

    def _key(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self._one_name[name] for name in parts)

    def _plain(self, parts: tuple[str, ...]) -> list[Tensor]:
        for name in parts:
            if self.tensors[name].is_meta:
                raise RuntimeError(f"{name}: only its packed form is left, its plain copy was released")
        return [self.tensors[name] for name in parts]
