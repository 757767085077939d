"""A weight that stays quantised in groups of 32, as GGUF files have them. Knows no file and no kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

QuantKind = Literal["q8_0", "q4_0", "q4_1"]
"""How a group's 32 weights are stored; see `QuantisedMatrix`."""

GROUP = 32
"""Weights that share one scale."""

PLANES: dict[QuantKind, int] = {"q8_0": 2, "q4_0": 4, "q4_1": 4}
"""Groups whose quants lie beside each other in 16 bits; `PLANES * GROUP` weights are a span."""

QUANT_KINDS: tuple[QuantKind, ...] = get_args(QuantKind)


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedMatrix:
    """A matrix [N, K] of quants with a scale per group of 32 along K.

    A weight is `scale * quant` (`q8_0`), `scale * (quant - 8)` (`q4_0`) or `scale * quant + min` (`q4_1`), in
    float32. A row's groups are taken in spans of as many as fit beside each other in 16 bits, 2 of 8 or 4 of
    4 bits. A span is 32 words, and word w holds quant w of each of its groups, the first in the lowest bits.
    So a kernel reads 64 bytes of a row as aligned 16-byte loads, and one mask gives all of a group in order.
    A row ends with a whole span: groups behind K have quants, scales and mins of 0.

    Attributes:
        kind: `q8_0`, `q4_0` or `q4_1`.
        shape: (N, K); K is a multiple of 32.
        quants: [N, spans * 32], contiguous: int16 for `q8_0`, else uint16.
        scales: [N, spans * 2 or 4] float16, contiguous, one per group.
        mins: As scales, for `q4_1`; else None.

    Raises:
        ValueError: A part is not as said here.
    """

    kind: QuantKind
    shape: tuple[int, int]
    quants: Tensor
    scales: Tensor
    mins: Tensor | None = None

    def __post_init__(self) -> None:
        if self.kind not in QUANT_KINDS:
            raise ValueError(f"kind={self.kind!r} is none of {', '.join(QUANT_KINDS)}")
        num_rows, width = self.shape
        if width < GROUP or width % GROUP:
            raise ValueError(f"shape={self.shape}: rows are whole groups of {GROUP}, at least one")
        if (self.mins is not None) != (self.kind == "q4_1"):
            raise ValueError(f"mins: kind {self.kind} has {'some' if self.kind == 'q4_1' else 'none'}")
        num_planes = PLANES[self.kind]
        num_spans = -(-width // (GROUP * num_planes))
        groups = (num_rows, num_spans * num_planes)
        expected = {
            "quants": (self.quants, (num_rows, num_spans * GROUP)),
            "scales": (self.scales, groups),
        }
        if self.mins is not None:
            expected["mins"] = (self.mins, groups)
        dtypes = {"quants": torch.int16 if self.kind == "q8_0" else torch.uint16}
        for name, (part, shape) in expected.items():
            dtype = dtypes.get(name, torch.float16)
            if tuple(part.shape) != shape or part.dtype != dtype or not part.is_contiguous():
                raise ValueError(
                    f"{name} is {list(part.shape)} {part.dtype}, {self.kind} {self.shape} has a contiguous "
                    f"{list(shape)} {dtype}"
                )
            if part.device != self.quants.device:
                raise ValueError(f"{name} is on {part.device}, quants are on {self.quants.device}")

    @classmethod
    def from_gguf(cls, kind: QuantKind, raw: npt.NDArray[np.uint8] | Tensor) -> "QuantisedMatrix":
        """Takes a tensor's bytes as they are in a file; loses nothing.

        Args:
            kind: The file's type of this tensor, in lower case.
            raw: [N, bytes of a row] uint8: per group its scale, its min if it has one, its quants.

        Raises:
            ValueError: The kind is unknown, or rows are no whole number of groups.
        """
        if kind not in QUANT_KINDS:
            raise ValueError(f"kind={kind!r} is none of {', '.join(QUANT_KINDS)}")
        source = torch.from_numpy(np.array(raw)) if isinstance(raw, np.ndarray) else raw
        head = 4 if kind == "q4_1" else 2
        num_bytes = head + (GROUP if kind == "q8_0" else GROUP // 2)
        if source.dtype != torch.uint8 or source.dim() != 2 or not source.numel():
            raise ValueError(f"raw is {list(source.shape)} {source.dtype}, a matrix of uint8 is taken")
        if source.shape[1] % num_bytes:
            raise ValueError(f"raw has rows of {source.shape[1]} bytes, a group of {kind} has {num_bytes}")
        num_rows, num_groups = source.shape[0], source.shape[1] // num_bytes
        groups = source.reshape(num_rows, num_groups, num_bytes)
        groups = F.pad(groups, (0, 0, 0, -num_groups % PLANES[kind]))
        heads = groups[..., :head].contiguous().view(torch.float16)
        quants = groups[..., head:]
        if kind != "q8_0":
            # In a file, byte j of a group holds quants j and 16 + j.
            quants = torch.cat((quants & 15, quants >> 4), dim=-1)
        planes = quants.to(torch.int32).view(num_rows, -1, PLANES[kind], GROUP)
        shifts = torch.arange(PLANES[kind], device=source.device) * (16 // PLANES[kind])
        words = (planes << shifts[:, None]).sum(2, dtype=torch.int32).to(torch.int16)
        return cls(
            kind=kind,
            shape=(num_rows, num_groups * GROUP),
            quants=(words if kind == "q8_0" else words.view(torch.uint16)).view(num_rows, -1),
            scales=heads[..., 0].contiguous(),
            mins=heads[..., 1].contiguous() if kind == "q4_1" else None,
        )

    @classmethod
    def stack(cls, parts: Sequence["QuantisedMatrix"]) -> "QuantisedMatrix":
        """The parts one below the other; of one part the part itself.

        Args:
            parts: At least one, of one kind, width and device.

        Raises:
            ValueError: There is no part, or they differ.
        """
        if not parts:
            raise ValueError("parts: there are none")
        first = parts[0]
        if len(parts) == 1:
            return first
        for part in parts[1:]:
            if (part.kind, part.shape[1], part.device) != (first.kind, first.shape[1], first.device):
                raise ValueError(
                    f"parts: {part.kind} of width {part.shape[1]} on {part.device} below {first.kind} of "
                    f"width {first.shape[1]} on {first.device}"
                )
        mins = [part.mins for part in parts if part.mins is not None]
        return cls(
            kind=first.kind,
            shape=(sum(part.shape[0] for part in parts), first.shape[1]),
            quants=torch.cat([part.quants.view(torch.int16) for part in parts]).view(first.quants.dtype),
            scales=torch.cat([part.scales for part in parts]),
            mins=torch.cat(mins) if mins else None,
        )

    @property
    def device(self) -> torch.device:
        """Where all parts are."""
        return self.quants.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts: 34 (`q8_0`), 18 (`q4_0`) or 20 (`q4_1`) per group, padding too."""
        parts = (self.quants, self.scales, self.mins)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def to(self, device: torch.device | str) -> "QuantisedMatrix":
        """The same matrix on a device; the same object where it is there already."""
        if self.quants.device == torch.device(device):
            return self
        mins = None if self.mins is None else self.mins.to(device)
        return QuantisedMatrix(self.kind, self.shape, self.quants.to(device), self.scales.to(device), mins)

    def take(self, rows: Tensor) -> "QuantisedMatrix":
        """The rows of these numbers, in their order.

        Args:
            rows: [T] int32 or int64, each in [0, N), T at least 1.
        """
        mins = None if self.mins is None else self.mins.index_select(0, rows)
        return QuantisedMatrix(
            self.kind,
            (rows.shape[0], self.shape[1]),
            self.quants.view(torch.int16).index_select(0, rows).view(self.quants.dtype),
            self.scales.index_select(0, rows),
            mins,
        )

    def dequantise(self) -> Tensor:
        """All weights, [N, K] float32, with the bits that the `gguf` package gives."""
        num_rows, width = self.shape
        num_planes = PLANES[self.kind]
        words = self.quants.view(torch.int16).to(torch.int32).view(num_rows, -1, 1, GROUP)
        shifts = torch.arange(num_planes, device=self.device) * (16 // num_planes)
        planes = words >> shifts[:, None]
        if self.kind == "q8_0":
            quants = planes.to(torch.int8).float()
        else:
            quants = (planes & 15).float()
            if self.kind == "q4_0":
                quants -= 8.0
        weights = quants.mul_(self.scales.float().view(num_rows, -1, num_planes, 1))
        if self.mins is not None:
            weights += self.mins.float().view(num_rows, -1, num_planes, 1)
        return weights.view(num_rows, -1)[:, :width].contiguous()
