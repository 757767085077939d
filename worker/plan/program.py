"""A program as plain values: a flat list of launches over one arena. Knows no graph, tensor or executor."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

LANES = 16
"""Rows and results in the arena start at multiples of so many floats: 64 bytes, a cache line."""


class Extent(Enum):
    """What the first dimension of a result counts; live numbers are data of each run."""

    TOKENS = "T"
    ROWS = "R"
    LOGITS = "L"


_COUNTED_BY = {
    "token_ids": Extent.TOKENS,
    "position": Extent.TOKENS,
    "slot_mapping": Extent.TOKENS,
    "block_table": Extent.ROWS,
    "context_len": Extent.ROWS,
    "query_start": Extent.ROWS,
    "logits_index": Extent.LOGITS,
}


def live_length(name: str, live: Mapping[Extent, int]) -> int:
    """Length of the live part of an input, where `live` tells how many tokens, rows and logits a run has."""
    return live[_COUNTED_BY[name]] + (name == "query_start")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a program has room for; a run wants logits of at most `num_rows` tokens.

    Attributes:
        num_tokens: Tokens of a run.
        num_rows: Rows of a run, those without tokens included.
        max_blocks: Width of the block table.

    Raises:
        ValueError: A number is below 1.
    """

    num_tokens: int
    num_rows: int
    max_blocks: int

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_rows", "max_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is below 1")

    def of(self, extent: Extent) -> int:
        """Most that `extent` counts in a run."""
        return self.num_tokens if extent is Extent.TOKENS else self.num_rows


@dataclass(frozen=True, slots=True)
class Input:
    """A field of `StepInputs`, bound before each run."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor of the `WeightStore`: its parts stacked by rows."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer's keys or values in the pool; launches may write it."""

    layer: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class Value:
    """A result, or columns of one: rows in the arena.

    Attributes:
        name: Of the node that computes it.
        extent: What its rows count.
        offset: Floats from the arena's start to its first row.
        row_stride: Floats from row to row, a multiple of `LANES`.
        width: Elements of a row that belong to it.
        dtype: Of the elements: `float32`, or `float16` or `bfloat16`, two of which take a float's place.
        planes: Partial sums that lie one behind the other and together are the value.
        plane_stride: Floats from plane to plane; 0 of one plane.
    """

    name: str
    extent: Extent
    offset: int
    row_stride: int
    width: int
    dtype: str = "float32"
    planes: int = 1
    plane_stride: int = 0


Operand: TypeAlias = Input | Constant | KvLayer | Value | float


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of one operator.

    Attributes:
        operator: Name without the prefix `pagecast.`.
        arguments: In the order of the operator's schema.
        outputs: What it writes in the arena; none if it only writes the pool.
    """

    operator: str
    arguments: tuple[Operand, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A step, ready for an executor.

    Attributes:
        launches: In order.
        output: The logits; nothing overwrites them within a run.
        arena_bytes: Size of the arena that all results share.
        unshared_bytes: What the results would take if each had memory of its own.
        capacity: What a run may hold.
    """

    launches: tuple[Launch, ...]
    output: Value
    arena_bytes: int
    unshared_bytes: int
    capacity: Capacity
