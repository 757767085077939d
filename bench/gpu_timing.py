"""How long things take on a device, and what it can do at best: bandwidth of a copy, rate of a product."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

Call = Callable[[], object]


def cold_copies(num_bytes: int, *, device: torch.device, cache_bytes: int = 256 << 20) -> int:
    """How many copies of an operand it takes for each to have left the caches at its next use."""
    return 1 if device.type == "cpu" else max(2, -(-cache_bytes // max(1, num_bytes)))


def time_ms(calls: Sequence[Call], *, device: torch.device, repeats: int = 15) -> float:
    """Median time of one call, in milliseconds.

    On a GPU all calls are captured into a CUDA graph once and replayed, so that what the host takes to launch
    does not count; give as many calls over different operands as caches must not hold.

    Args:
        calls: That do the same work; they must not wait for the device.
        device: What they run on.
        repeats: Rounds of all calls.
    """
    if device.type == "cpu":
        times = []
        for _ in range(min(repeats, 3)):
            start = time.perf_counter()
            for call in calls:
                call()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3 / len(calls)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize(device)
    times = [start.elapsed_time(end) for start, end in pairwise(marks)]
    return statistics.median(times) / len(calls)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by the copy of a tensor that no cache holds."""
    num_bytes = (1 << 30) if device.type == "cuda" else (1 << 24)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    milliseconds = time_ms([lambda: target.copy_(source)], device=device)
    return 2 * num_bytes / milliseconds * 1e3


def matmul_rate(device: torch.device) -> float:
    """Floating point operations per second of a large product: bfloat16, on a CPU a small one of float32."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(size, size, generator=generator, device=device, dtype=dtype)
    out = torch.empty_like(x)
    milliseconds = time_ms([lambda: torch.mm(x, x, out=out)], device=device)
    return 2 * size**3 / milliseconds * 1e3
