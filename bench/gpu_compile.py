"""Compiles all kernels that a section's cases launch, and launches none.

Triton keeps what it compiles on disk. So parts of sections that run like this side by side, on all cores,
spare the sections that measure the compiler, which takes one core for a minute or more.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.gpu_values import Case, Clock, Line, run_cases


@contextmanager
def compiling_alone() -> Iterator[set[str]]:
    """Has Triton compile where it would launch; yields the hashes of what was compiled so far."""
    from triton.runtime.jit import JITFunction  # noqa: PLC0415 - prepared first

    run = JITFunction.run
    hashes: set[str] = set()

    def compile_alone(self: Any, *arguments: Any, warmup: bool = False, **named: Any) -> Any:
        del warmup
        kernel = run(self, *arguments, warmup=True, **named)
        hashes.add(str(kernel.hash))
        return kernel

    JITFunction.run = compile_alone
    try:
        yield hashes
    finally:
        JITFunction.run = run


def compile_cases(name: str, cases: Sequence[Case], clock: Clock) -> Line:
    """Runs cases like this. What they say of numbers that nothing computed is dropped.

    Args:
        name: For the line.
        cases: Of a section, or a part of them.
        clock: Of the section.
    """
    start = time.perf_counter()
    with compiling_alone() as hashes:
        late = sum(line.note.startswith("left out") for line in run_cases(cases, clock))
    note = f"{len(hashes)} kernels" + (f", {late} cases left out: the time is up" if late else "")
    return Line(name, time.perf_counter() - start, "s", note=note)
