"""Room in host memory for blocks that left the pool. Knows bytes only, not whose they are."""

import torch
from torch import Tensor


class HostBlocks:
    """Places for whole blocks, one contiguous piece each.

    Args:
        num_blocks: Places.
        block_bytes: Size of a block.
        is_pinned: Whether the memory is locked for a device's copies, which then run beside everything else;
            needs CUDA or ROCm. torch may take up to twice the size for such memory.

    Attributes:
        data: [num_blocks, block_bytes] uint8; not zeroed.

    Raises:
        ValueError: A size is below 1.
        RuntimeError: The memory can't be had.
    """

    def __init__(self, num_blocks: int, block_bytes: int, *, is_pinned: bool = False) -> None:
        for name, size in (("num_blocks", num_blocks), ("block_bytes", block_bytes)):
            if size < 1:
                raise ValueError(f"{name}={size} is below 1")
        self.data: Tensor = torch.empty(num_blocks, block_bytes, dtype=torch.uint8, pin_memory=is_pinned)

    @property
    def num_blocks(self) -> int:
        """Places."""
        return self.data.shape[0]

    @property
    def block_bytes(self) -> int:
        """Size of a block."""
        return self.data.shape[1]
