"""Section: blocks that leave for host memory and come back: the same bits, and how fast."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.gpu_models import LLAMA3, TINY, block_bytes, random_pool
from bench.gpu_values import Case, Line, Setting
from worker.model.config import LlamaConfig

LEAST_BANDWIDTH = 40.0
"""GB/s, that evicting and restoring must reach each."""
_ROUNDS = 5


def cases(setting: Setting) -> list[Case]:
    """Both ways, for blocks of Llama-3-8B in bfloat16."""
    config, count = (TINY, 4) if setting.is_tiny else (LLAMA3, 1024)
    name = f"{count} blocks of {block_bytes(config, torch.bfloat16)} bytes"
    return [Case(f"evict and restore {name}", partial(_both_ways, setting, config, name, count))]


def _both_ways(setting: Setting, config: LlamaConfig, name: str, count: int) -> Iterator[Line]:
    device = torch.device(setting.device)
    kv = random_pool(config, 2 * count, dtype=torch.bfloat16, device=device, seed=3)
    host = kv.host_blocks(count)
    places = list(range(count))
    # Every second block leaves, and comes back where another was.
    from_blocks = [2 * place for place in places]
    to_blocks = [2 * place + 1 for place in reversed(places)]
    before = _bits(kv.data[from_blocks].clone())
    evict = _seconds(partial(kv.evict, from_blocks, host, places), device)
    kv.zero(from_blocks)
    restore = _seconds(partial(kv.restore, host, places, to_blocks), device)
    equal = torch.equal(_bits(kv.data[to_blocks]), before)
    yield Line(f"evict and restore {name}: equal bits", passed=equal)
    for what, seconds in (("evict", evict), ("restore", restore)):
        speed = count * block_bytes(config, torch.bfloat16) / seconds / 1e9
        passed = speed >= LEAST_BANDWIDTH if setting.judges_speed else None
        yield Line(f"{what} {name}", speed, "GB/s", passed=passed)


def _bits(data: Tensor) -> Tensor:
    return data.view(torch.int16)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Best of some rounds, until the device has done it."""
    best = float("inf")
    for _ in range(_ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
