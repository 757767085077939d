"""The tensor behind the KV blocks. Knows no policy: which block belongs to whom is data of each step."""

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from worker.kv.pages import zeros_on_huge_pages

_allocation_ids = count(1)
CPU = torch.device("cpu")


class KvStorage:
    """One zeroed tensor for the keys and values of all layers, block by block.

    Block-major, so that a block is one contiguous piece that can be copied out and back whole. Within a
    block each head is dense: its keys [head_size, block_size], so that a vector holds as many tokens in the
    dot products, its values [block_size, head_size], so that it holds elements in the weighted sum.

    Attributes:
        data: [num_blocks, num_layers, 2, num_kv_heads, block_size * head_size] float32; keys first.
        keys: Per layer a view [num_blocks, block_size, num_kv_heads, head_size] of `data`.
        values: As `keys`, of other strides.
        allocation_id: Names this allocation; never used again in this process.

    Raises:
        ValueError: A size is below 1.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        device: torch.device = CPU,
    ) -> None:
        sizes = {
            "num_blocks": num_blocks,
            "num_layers": num_layers,
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size} is below 1")
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.allocation_id = next(_allocation_ids)
        shape = num_blocks, num_layers, 2, num_kv_heads, block_size * head_size
        on_host = device.type == "cpu"
        self.data: Tensor = zeros_on_huge_pages(*shape) if on_host else torch.zeros(*shape, device=device)
        lead = num_blocks, num_layers, num_kv_heads
        keys = self.data[:, :, 0].view(*lead, head_size, block_size).permute(0, 1, 4, 2, 3)
        values = self.data[:, :, 1].view(*lead, block_size, head_size).permute(0, 1, 3, 2, 4)
        self.keys: tuple[Tensor, ...] = keys.unbind(1)
        self.values: tuple[Tensor, ...] = values.unbind(1)

    @property
    def num_bytes(self) -> int:
        """Size of `data`."""
        return self.data.nbytes

    def zero(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros, in all layers.

        Raises ValueError for one that is not there; nothing was overwritten then.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} is not in 0..{self.num_blocks - 1}")
        if blocks:
            self.data[list(blocks)] = 0.0

    @staticmethod
    def block_bytes(*, num_layers: int, block_size: int, num_kv_heads: int, head_size: int) -> int:
        """Size of one block of such a storage."""
        return num_layers * 2 * block_size * num_kv_heads * head_size * torch.float32.itemsize
