"""Places results in one piece of memory: those that live at other times share it. Knows sizes and times."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A result's size and when its memory is its own.

    Attributes:
        num_floats: Size.
        first: Number of the launch that writes it.
        last: Number of the last launch that reads it, not below `first`. Both count as lived through, so
            what a launch writes never lies over what it reads.
    """

    num_floats: int
    first: int
    last: int

    def meets(self, other: "Lifetime") -> bool:
        """Whether both live during some launch."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class Placement:
    """Where results lie.

    Attributes:
        offsets: In floats, in the order of the lifetimes.
        num_floats: Size of the arena.
    """

    offsets: tuple[int, ...]
    num_floats: int


def place(lifetimes: Sequence[Lifetime]) -> Placement:
    """Gives each result the lowest offset at which it overlaps none that lives with it, largest first.

    Sizes that are multiples of an alignment give offsets that are. The arena is never larger than the sum of
    the sizes, and never smaller than the most that lives at one time.

    Source: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020),
    arXiv:2001.03288, "greedy by size" of offsets.
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    for index in sorted(range(len(lifetimes)), key=lambda index: -lifetimes[index].num_floats):
        wanted = lifetimes[index]
        taken = sorted(
            (offsets[other], offsets[other] + lifetimes[other].num_floats)
            for other in placed
            if lifetimes[other].meets(wanted)
        )
        offset = 0
        for start, end in taken:
            if offset + wanted.num_floats <= start:
                break
            offset = max(offset, end)
        offsets[index] = offset
        placed.append(index)
    ends = (offset + life.num_floats for offset, life in zip(offsets, lifetimes, strict=True))
    return Placement(tuple(offsets), max(ends, default=0))
