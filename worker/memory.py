"""How much memory there is for the KV pool. Knows devices and the kernel's figures; no model, no pool."""

import ctypes
from contextlib import suppress
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
# Of a container, as it sees its own: control groups version 2, then 1. Both may hold no number.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# Of a worker's part of a device, for what is not there when the pool is sized: plans of single steps, lists
# of draws, what the driver takes for itself.
_KEPT = 0.05
MOST_BLOCKS = 1 << 24
"""Blocks of a pool at most, whatever the memory."""


class PoolTooLarge(Exception):
    """The KV pool has no room here; nothing was allocated."""

    def __init__(self, *, num_blocks: int, wanted_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"a KV pool of {num_blocks} blocks takes {wanted_bytes} bytes, {available_bytes} are available: "
            "lower --kv-blocks"
        )
        self.wanted_bytes = wanted_bytes
        self.available_bytes = available_bytes


def check_pool_fits(num_blocks: int, block_bytes: int, device: torch.device, share: float = 1.0) -> None:
    """Refuse a pool that `device` has no memory for, before any of it is allocated.

    Allocating proves nothing on a CPU: pages are only taken when a step first writes to them. So what is
    free now is also free for workers beside this one, and each has to keep to its share of the whole.

    Args:
        num_blocks: Of the pool.
        block_bytes: Size of a block.
        device: Where it is to be.
        share: Part of the device's memory, over 0 and at most 1.

    Raises:
        PoolTooLarge: It is over what `available_bytes` finds, or over the share of `total_bytes`.
    """
    wanted = num_blocks * block_bytes
    available = min(available_bytes(device), int(share * total_bytes(device)))
    if wanted > available:
        raise PoolTooLarge(num_blocks=num_blocks, wanted_bytes=wanted, available_bytes=available)


def blocks_that_fit(block_bytes: int, device: torch.device, share: float = 1.0) -> int:
    """Blocks of a pool that takes what is free on a device, but for a twentieth of the worker's part.

    Call it when everything else is there: weights, and plans with their graphs.

    Args:
        block_bytes: Size of a block.
        device: A CUDA device.
        share: Part of the device's memory that this process may take, over 0 and at most 1.

    Returns:
        From 1 to `MOST_BLOCKS`.

    Raises:
        PoolTooLarge: There is no room for one block.
    """
    part = int(share * total_bytes(device))
    free = min(available_bytes(device), part - held_bytes(device)) - int(_KEPT * part)
    if free < block_bytes:
        raise PoolTooLarge(num_blocks=1, wanted_bytes=block_bytes, available_bytes=max(free, 0))
    return min(free // block_bytes, MOST_BLOCKS)


def out_of_memory(error: BaseException) -> str:
    """What to do where an error says that a device has no memory left; empty for any other error."""
    first = str(error).partition("\n")[0]
    # Of torch's calls, and of Triton's where the driver finds no room for a kernel.
    texts = ("CUDA error", "HIP error", "Triton Error")
    is_one = isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and first.startswith(texts) and "out of memory" in first
    )
    if not is_one:
        return ""
    narrower = "or choose a narrower --kv-dtype or --weights"
    return f"out of memory: lower --kv-blocks or --max-step-tokens, {narrower} ({first})"


def give_back() -> None:
    """Returns memory that this process freed and still holds to the system, where the C library can.

    What loading a model leaves behind is many small pieces between those that stay.
    """
    with suppress(AttributeError, OSError):  # of another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def held_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that torch holds in this process, in bytes."""
    return int(torch.cuda.memory_reserved(device))


def available_bytes(device: torch.device) -> int:
    """Memory that this process could still take on `device`, in bytes; an upper bound in a container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_of_host("MemAvailable"), *_container_limits()])


def total_bytes(device: torch.device) -> int:
    """Memory of `device`, used or not, in bytes; in a container what that may take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return min([_of_host("MemTotal"), *_container_limits()])


def _of_host(wanted: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{_MEMINFO} has no {wanted}")


def _container_limits() -> list[int]:
    texts = [path.read_text().strip() for path in _LIMITS if path.is_file()]
    return [int(text) for text in texts if text.isdigit()]
