"""Who holds which KV blocks, by count. Knows ids only: no tensors, no sessions, no policy."""

from collections import deque
from collections.abc import Iterable

from worker.errors import OutOfBlocks


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1, counts their holders and takes them back; all-or-nothing.

    A call that raises changes nothing. A block is free when its last holder has released it. Freed
    blocks are handed out again last, so that a block's content survives as long as possible.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._num_holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def num_holders(self, block: int) -> int:
        """How many hold the block; 0: it is free. Raises ValueError for one that is not in the pool."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is not in a pool of {self.num_blocks}")
        return self._num_holders[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks as their one holder. Raises OutOfBlocks if fewer are free."""
        if count < 0:
            raise ValueError(f"count is {count}")
        if count > len(self._free):
            raise OutOfBlocks(wanted=count, free=len(self._free))
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Become one more holder of held blocks. Raises ValueError for one not held, or named twice."""
        for block in self._held(blocks):
            self._num_holders[block] += 1

    def release(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Be a holder of these blocks no more, the tail of a table first.

        Returns:
            Those that are free now, in the order named.

        Raises:
            ValueError: One is not held, or named twice.
        """
        released = self._held(blocks)
        for block in released:
            self._num_holders[block] -= 1
        freed = tuple(block for block in released if self._num_holders[block] == 0)
        self._free.extend(reversed(freed))
        return freed

    def _held(self, blocks: Iterable[int]) -> list[int]:
        """The blocks, checked as a whole before anything changes."""
        named = list(blocks)
        if len(set(named)) != len(named):
            raise ValueError(f"blocks named twice: {named}")
        for block in named:
            if self.num_holders(block) == 0:
                raise ValueError(f"block {block} is not held")
        return named
