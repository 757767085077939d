"""Which KV blocks are held. Knows ids only: no tensors, no sessions, no policy."""

from collections import deque
from collections.abc import Iterable

from worker.errors import OutOfBlocks


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1 and takes them back; all-or-nothing.

    A call that raises changes nothing. Freed blocks are handed out again last, so that
    a block's content survives as long as possible.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._is_held = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises OutOfBlocks if fewer are free."""
        if count > len(self._free):
            raise OutOfBlocks(wanted=count, free=len(self._free))
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._is_held[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back, the tail of a table first. Raises ValueError for one not held, or named twice."""
        returned = list(blocks)
        if len(set(returned)) != len(returned):
            raise ValueError(f"blocks named twice: {returned}")
        for block in returned:
            if not 0 <= block < self.num_blocks or not self._is_held[block]:
                raise ValueError(f"block {block} is not held")
        for block in reversed(returned):
            self._is_held[block] = 0
            self._free.append(block)
