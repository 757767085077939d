"""The tensor behind the KV blocks, and its copies to host memory and back.

Knows no policy: which block belongs to whom, and which one leaves, is data of each step.
"""

from collections.abc import Sequence
from itertools import count
from operator import index

import torch
from torch import Tensor

from worker.kv.host_blocks import HostBlocks
from worker.kv.pages import zeros_on_huge_pages

_allocation_ids = count(1)
CPU = torch.device("cpu")
KV_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
"""What a storage may hold, by name."""
_SCALE_BYTES = 4


class KvStorage:
    """One zeroed tensor for the keys and values of all layers, block by block.

    Block-major, so that a block is one contiguous piece that can be copied out and back whole. Within a
    block each head is dense. Values lie as [block_size, head_size]. Keys lie as these do where kernels load a
    token's elements at once (Triton's), or across, [head_size, block_size], where a vector is to hold as many
    tokens in the dot products (the native kernels'). Behind a head's int8 elements lie their scales, one for
    each token, within the same piece.

    Args:
        num_blocks: Blocks.
        num_layers: Of the model.
        block_size: Tokens per block.
        num_kv_heads: Of the model.
        head_size: Of the model.
        dtype: One of `KV_DTYPES`; int8 in host memory only.
        keys_across: Whether keys lie as [head_size, block_size].
        device: Where it is.
        key_scales: [num_layers, num_kv_heads] float32, over 0 and finite, for float8_e4m3fn only: what is
            stored times its head's scale is the key. None: ones.
        value_scales: As `key_scales`.

    Attributes:
        data: [num_blocks, num_layers, 2, num_kv_heads, block_size * head_size]; keys first. Of int8 a head
            has 4 * block_size more, the bytes of its scales.
        keys: Per layer a view [num_blocks, block_size, num_kv_heads, head_size] of `data`.
        values: As `keys`, of strides of their own.
        key_scales: By layer what stored keys are multiplied with, float32: of float8_e4m3fn [num_kv_heads]
            each, on the device; of int8 [num_blocks, block_size, num_kv_heads], views of `data`; else None.
        value_scales: As `key_scales`.
        allocation_id: Names this allocation; never used again in this process.

    Raises:
        ValueError: A size is below 1, the dtype is none of `KV_DTYPES`, or scales are wrong or not wanted.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
        keys_across: bool = True,
        device: torch.device = CPU,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
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
        if dtype not in KV_DTYPES.values():
            raise ValueError(f"dtype={dtype} is none of {', '.join(KV_DTYPES)}")
        if dtype == torch.int8 and device.type != "cpu":
            raise ValueError(f"dtype=torch.int8 is for host memory, not for {device}")
        if dtype == torch.int8 and block_size * head_size % _SCALE_BYTES:
            raise ValueError(
                f"head_size={head_size}: {block_size} tokens of it must be a multiple of {_SCALE_BYTES} int8"
                " elements, for the scales behind them"
            )
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.dtype = dtype
        self.keys_across = keys_across
        self.device = device
        self.key_scales: Sequence[Tensor] | None = self._scales("key_scales", key_scales)
        self.value_scales: Sequence[Tensor] | None = self._scales("value_scales", value_scales)
        self.allocation_id = next(_allocation_ids)
        num_elements = block_size * head_size
        shape = num_blocks, num_layers, 2, num_kv_heads, num_elements + _scale_bytes(block_size, dtype)
        if device.type == "cpu":
            self.data: Tensor = zeros_on_huge_pages(*shape, dtype=dtype)
        else:
            self.data = torch.zeros(*shape, dtype=dtype, device=device)
        lead = num_blocks, num_layers, num_kv_heads
        elements = self.data[..., :num_elements]
        if keys_across:
            keys = elements[:, :, 0].view(*lead, head_size, block_size).permute(0, 1, 4, 2, 3)
        else:
            keys = elements[:, :, 0].view(*lead, block_size, head_size).permute(0, 1, 3, 2, 4)
        values = elements[:, :, 1].view(*lead, block_size, head_size).permute(0, 1, 3, 2, 4)
        self.keys: tuple[Tensor, ...] = keys.unbind(1)
        self.values: tuple[Tensor, ...] = values.unbind(1)
        if dtype == torch.int8:
            scales = self.data.view(torch.float32)[..., num_elements // _SCALE_BYTES :]
            self.key_scales = scales[:, :, 0].permute(0, 1, 3, 2).unbind(1)
            self.value_scales = scales[:, :, 1].permute(0, 1, 3, 2).unbind(1)
        # Bits are bits: a float's copy may make another NaN of one, and float8 has no fill everywhere.
        self._bytes = self.data.view(num_blocks, -1).view(torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Size of `data`."""
        return self.data.nbytes

    def zero(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros, in all layers.

        Raises ValueError for one that is not there; nothing was overwritten then.
        """
        numbers = _checked("block", blocks, self.num_blocks)
        if numbers:
            self._bytes[numbers] = 0

    def host_blocks(self, num_blocks: int) -> HostBlocks:
        """Room for so many of these blocks in host memory, pinned where the device copies by itself."""
        is_pinned = self.device.type == "cuda"
        return HostBlocks(num_blocks, self._bytes.shape[1], is_pinned=is_pinned)

    def evict(self, blocks: Sequence[int], host: HostBlocks, places: Sequence[int]) -> None:
        """Copy blocks to host memory, bit for bit; the pool's own stay as they are.

        One copy a block on the device's current stream, not waited for: what the stream runs afterwards may
        overwrite the blocks, `restore` on it finds them, and the host has to wait for the stream first.

        Args:
            blocks: What is copied, each once.
            host: Where to.
            places: As many places of `host`, each once.

        Raises:
            ValueError: A block or a place is not there or named twice, their numbers differ, or `host` is
                for blocks of another size; nothing was copied.
        """
        for block, place in self._checked_copy(blocks, host, places):
            host.data[place].copy_(self._bytes[block], non_blocking=True)

    def restore(self, host: HostBlocks, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy blocks back from host memory, into the same blocks of the pool or others.

        As `evict`, the other way round: whatever the stream runs afterwards reads the restored blocks. The
        places must not be written before it got there.

        Args:
            host: Where from.
            places: What is copied, each once.
            blocks: As many blocks, each once; overwritten.

        Raises:
            ValueError: As for `evict`; nothing was copied.
        """
        for block, place in self._checked_copy(blocks, host, places):
            self._bytes[block].copy_(host.data[place], non_blocking=True)

    @staticmethod
    def block_bytes(
        *,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        """Size of one block of such a storage."""
        head_bytes = block_size * head_size * dtype.itemsize + _scale_bytes(block_size, dtype)
        return num_layers * 2 * num_kv_heads * head_bytes

    def _checked_copy(
        self, blocks: Sequence[int], host: HostBlocks, places: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Pairs of a block and its place."""
        if host.block_bytes != self._bytes.shape[1]:
            raise ValueError(
                f"host holds blocks of {host.block_bytes} bytes, the pool's have {self._bytes.shape[1]}"
            )
        if len(blocks) != len(places):
            raise ValueError(f"{len(blocks)} blocks and {len(places)} places")
        pair = []
        for name, given, size in (("block", blocks, self.num_blocks), ("place", places, host.num_blocks)):
            numbers = _checked(name, given, size)
            if len(set(numbers)) != len(numbers):
                twice = next(number for number in numbers if numbers.count(number) > 1)
                raise ValueError(f"{name} {twice} is named twice")
            pair.append(numbers)
        return list(zip(*pair, strict=True))

    def _scales(self, name: str, given: Tensor | None) -> Sequence[Tensor] | None:
        shape = self.num_layers, self.num_kv_heads
        if self.dtype != torch.float8_e4m3fn:
            if given is not None:
                raise ValueError(f"{name} is for float8_e4m3fn, the storage holds {self.dtype}")
            return None
        if given is None:
            return torch.ones(shape, device=self.device).unbind()
        if given.shape != shape or given.dtype != torch.float32:
            raise ValueError(f"{name} is {given.dtype} {list(given.shape)}, it must be float32 {list(shape)}")
        if not bool(((given > 0) & given.isfinite()).all()):
            raise ValueError(f"{name} has a scale that is not over 0 and finite")
        return given.to(self.device).unbind()


def _scale_bytes(block_size: int, dtype: torch.dtype) -> int:
    """Bytes that scales take in a head's part of a block."""
    return block_size * _SCALE_BYTES if dtype == torch.int8 else 0


def _checked(name: str, given: Sequence[int], size: int) -> list[int]:
    """Numbers as plain ints: elements of a tensor, say, are told apart by identity."""
    numbers = [index(number) for number in given]
    for number in numbers:
        if not 0 <= number < size:
            raise ValueError(f"{name} {number} is not in 0..{size - 1}")
    return numbers
