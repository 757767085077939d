"""What a step costs in process, without gateway and gRPC: `python -m bench steps`.

Prints the median time of steps of one and of eight rows, of a prefill, and of a replanned step, beside
the floor: bytes of weights that a step reads over the read bandwidth that is measured between the steps. GB/s
are the same bytes over a step's time.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.table import Table

from bench.floor import Reader, weight_bytes
from bench.loading import Bench
from worker.batch import Batch, DecodePlan, Row

BLOCKS_PER_ROW = 16
CONTEXT = 128


def measure(bench: Bench, repeats: int, reader: Reader) -> None:
    """Measure steps and print a table.

    Args:
        bench: What is measured.
        repeats: Steps of each kind; the median is shown.
        reader: Tells the bandwidth.
    """
    runner = bench.runner(bench.pool(8 * BLOCKS_PER_ROW), max_step_tokens=256)
    runner.warm_up()
    read_bytes = weight_bytes(bench)
    steps = {
        f"decode, 1 row, context {CONTEXT}": [_row(0, CONTEXT, 1)],
        f"decode, 8 rows, context {CONTEXT}": [_row(number, CONTEXT, 1) for number in range(8)],
        "prefill, 64 tokens": [_row(0, 0, 64)],
        "prefill, 64 tokens, beside 7 decode rows": [
            _row(0, 0, 64),
            *(_row(number, CONTEXT, 1) for number in range(1, 8)),
        ],
        f"replan, 1 row, context {CONTEXT}": [_row(0, CONTEXT, 1, DecodePlan.REPLAN)],
    }
    bandwidths, found = [reader.read()], {}
    for name, rows in steps.items():
        found[name] = statistics.median(_times_s(partial(runner.run, Batch(tuple(rows))), repeats)) * 1e3
        bandwidths.append(reader.read())
    bandwidth = statistics.median(bandwidths)
    floor_ms = read_bytes / bandwidth * 1e3
    table = Table("step", "median ms", "GB/s", "x floor", title=bench.title)
    for name, milliseconds in found.items():
        gigabytes = read_bytes / milliseconds / 1e6
        table.add_row(name, f"{milliseconds:.1f}", f"{gigabytes:.1f}", f"{milliseconds / floor_ms:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"floor {floor_ms:.1f} ms: {read_bytes / 1e6:.0f} MB of weights over {bandwidth / 1e9:.1f} GB/s"
    )


def _row(number: int, position: int, count: int, plan: DecodePlan = DecodePlan.PLAN_ONCE) -> Row:
    blocks = range(number * BLOCKS_PER_ROW, (number + 1) * BLOCKS_PER_ROW)
    return Row(str(number), tuple(range(1, 1 + count)), position, tuple(blocks), wants_logits=True, plan=plan)


def _times_s(call: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times
