"""Host memory for the pool, on large pages. Knows bytes only."""

import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 1 << 21


def zeros_on_huge_pages(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros in memory of their own that starts at a huge page and asks the system for such pages.

    Blocks lie far apart: on pages of 4 KiB nearly each piece of a block that attention reads needs a page
    walk of its own (docs/decisions/0017 has the figures). A system that has no huge pages, or none left,
    gives plain ones, and pages are taken when they are first written, either way.

    Args:
        shape: At least one element.
        dtype: One whose zero is all bits zero.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    # Shared memory, the default, has huge pages only where its own setting says so.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
    if num_bytes >= HUGE_PAGE_BYTES:
        room.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    bytes_ = torch.frombuffer(room, dtype=torch.uint8, offset=start, count=num_bytes)
    return bytes_.view(dtype).view(shape)
