"""How much memory there is for the KV pool. Knows devices and the kernel's figures; no model, no pool."""

from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
# Of a container, as it sees its own: control groups version 2, then 1. Both may hold no number.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class PoolTooLarge(Exception):
    """The KV pool has no room here; nothing was allocated."""

    def __init__(self, *, num_blocks: int, wanted_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"a KV pool of {num_blocks} blocks takes {wanted_bytes} bytes, {available_bytes} are available: "
            "lower --kv-blocks"
        )
        self.wanted_bytes = wanted_bytes
        self.available_bytes = available_bytes


def check_pool_fits(num_blocks: int, block_bytes: int, device: torch.device) -> None:
    """Refuse a pool that `device` has no memory for, before any of it is allocated.

    Allocating proves nothing on a CPU: pages are only taken when a step first writes to them.

    Raises:
        PoolTooLarge: It is over what `available_bytes` finds.
    """
    wanted, available = num_blocks * block_bytes, available_bytes(device)
    if wanted > available:
        raise PoolTooLarge(num_blocks=num_blocks, wanted_bytes=wanted, available_bytes=available)


def available_bytes(device: torch.device) -> int:
    """Memory that this process could still take on `device`, in bytes; an upper bound in a container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_available_on_host(), *_container_limits()])


def _available_on_host() -> int:
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{_MEMINFO} has no MemAvailable")


def _container_limits() -> list[int]:
    texts = [path.read_text().strip() for path in _LIMITS if path.is_file()]
    return [int(text) for text in texts if text.isdigit()]
