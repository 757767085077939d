"""What the compiler makes of Triton's kernels for GPUs that are not here: `python -m bench kernel-report`.

Every module of kernels lists its cases, made by what its launcher launches. Each is compiled anew, without a
GPU and without Triton's cache, and held against what it promises: nothing spilled, shared memory within the
device's, keys, values and weights read 16 bytes at once, the matrix instruction that its config is for, and
no TF32. Knows kernels only by their cases.
"""

import json
import multiprocessing
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

from rich.console import Console
from rich.table import Table
from triton.runtime.jit import JITFunction

from bench.kernel_compile import Finding, examine, refuse_interpreter
from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.targets import TARGETS

KERNELS = "worker.kernels.triton"
_KERNEL_SUFFIX = "_kernel"


@dataclass(frozen=True, slots=True)
class Wish:
    """What to report.

    Attributes:
        targets: Names of targets; empty: all.
        ops: Modules of kernels; empty: all.
        every_case: Whether cases that are not named are compiled too.
        num_jobs: Processes that compile side by side.
        package: Where the modules of kernels are.
    """

    targets: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    every_case: bool = False
    num_jobs: int = 1
    package: str = KERNELS

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.targets) - TARGETS.keys()):
            raise ValueError(f"targets {unknown} are none of {', '.join(TARGETS)}")
        if self.num_jobs < 1:
            raise ValueError(f"num_jobs={self.num_jobs} is below 1")


@dataclass(frozen=True, slots=True)
class Report:
    """What was found.

    Attributes:
        findings: One per case.
        uncovered: Kernels of a module, by `target op kernel`, that no case compiles.
    """

    findings: tuple[Finding, ...]
    uncovered: tuple[str, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """A line for everything that is not as promised; empty: all is well."""
        told = [
            f"{found.target} {found.op}, {found.label}: {failure}"
            for found in self.findings
            for failure in found.failures
        ]
        return (*told, *(f"{name}: no case compiles it" for name in self.uncovered))


def make_report(wish: Wish) -> Report:
    """Compiles what is wished for.

    Raises:
        RuntimeError: The process is one of Triton's interpreter.
        ValueError: A module that was asked for has no kernels, or there is no case at all.
    """
    refuse_interpreter()
    found = dict(_modules(wish.package))
    if unknown := sorted(set(wish.ops) - found.keys()):
        raise ValueError(f"op {unknown}: kernels are in {', '.join(found)}")
    jobs = []
    uncovered = []
    for target in wish.targets or TARGETS:
        covered = set()
        for op in wish.ops or found:
            for at, case in enumerate(_cases(wish.package, op, target)):
                if wish.every_case or case.is_named:
                    jobs.append((wish.package, op, target, at))
                    covered.add((case.kernel.__module__, case.kernel.__name__))
        uncovered += [
            f"{target} {op} {name}"
            for op in wish.ops or found
            for name in _kernels(found[op])
            if (found[op].__name__, name) not in covered
        ]
    if not jobs:
        raise ValueError(f"{wish.package} has no case for {', '.join(wish.targets or TARGETS)}")
    if wish.num_jobs == 1:
        return Report(tuple(_examine(job) for job in jobs), tuple(uncovered))
    # Not forked: the compiler has threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(wish.num_jobs, mp_context=context) as pool:
        return Report(tuple(pool.map(_examine, jobs, chunksize=4)), tuple(uncovered))


def _modules(package: str) -> Iterator[tuple[str, ModuleType]]:
    """Modules that have kernels or cases, by name."""
    for info in pkgutil.iter_modules(import_module(package).__path__):
        module = import_module(f"{package}.{info.name}")
        if hasattr(module, "compile_cases") or _kernels(module):
            yield info.name, module


def _kernels(module: ModuleType) -> list[str]:
    """Names of the kernels that a module defines, without what kernels call."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
        and value.__module__ == module.__name__
        and name.endswith(_KERNEL_SUFFIX)
    ]


@cache
def _cases(package: str, op: str, target: str) -> Sequence[CompileCase]:
    module = import_module(f"{package}.{op}")
    listed: Sequence[CompileCase] = getattr(module, "compile_cases", lambda _: ())(TARGETS[target])
    return listed


def _examine(job: tuple[str, str, str, int]) -> Finding:
    # A case does not travel between processes: each lists them again.
    package, op, target, at = job
    return examine(_cases(package, op, target)[at])


def as_json(report: Report) -> str:
    """The report as one JSON object."""
    return json.dumps(
        {
            "passed": not report.failures,
            "failures": report.failures,
            "cases": [asdict(found) for found in report.findings],
        },
        indent=1,
    )


def print_report(report: Report, console: Console) -> None:
    """A table with a line per case, then what failed and what it all took."""
    table = Table(
        "target",
        "op",
        "case",
        "regs",
        "spill",
        "parked",
        "shared",
        "loads, bytes",
        "stores, bytes",
        "matrix",
        "",
    )
    for found in report.findings:
        table.add_row(
            found.target,
            found.op,
            found.label,
            str(found.registers),
            str(found.spill_bytes),
            str(found.parked_scalars),
            str(found.shared_bytes),
            _widths(found.loads),
            _widths(found.stores),
            " ".join(found.matrix) or "none",
            "FAIL" if found.failures else "ok",
        )
    console.print(table)
    for failure in report.failures:
        console.print(f"FAIL {failure}", markup=False, highlight=False, soft_wrap=True)
    seconds = sum(found.compile_s for found in report.findings)
    console.print(
        f"{len(report.findings)} cases, {len(report.failures)} failures, {seconds:.0f} s of compiling",
        highlight=False,
    )


def _widths(by_pointer: Mapping[str, Mapping[int, int]]) -> str:
    return " ".join(f"{name}:{'/'.join(map(str, widths))}" for name, widths in by_pointer.items())
