"""Compiles one kernel for a device that is not here, and tells what the compiler made of it.

Knows Triton's compiler and the tools that come with it; which kernels there are is `kernel_report`'s.
"""

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from bench.kernel_accesses import Access, llvm_accesses, ptx_accesses
from worker.kernels.triton.compile_case import CompileCase

WIDE_BYTES = 16
"""The widest access that a thread has on all targets."""
PARKED_SCALARS = 16
"""Scalars that may be kept in lanes of a vector register, a quarter of one (decision 28)."""
_UNKNOWN = "?"
"""Stands for the pointer where an address leads to none."""
_MATRIX = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma\b|v_s?mfmac?_)\S*")
_TF32 = re.compile(r"\btf32\b|\.tf32|_xf32")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one kernel became.

    Attributes:
        op: Of the case.
        label: Of the case.
        target: Its name.
        registers: Of a thread.
        spill_bytes: Of a thread, in local memory (ROCm: scratch).
        parked_scalars: Scalar registers of a warp that are kept in lanes of vector registers, on ROCm.
        shared_bytes: Of a program.
        loads: Of each pointer how many load instructions there are of each width in bytes.
        stores: As `loads`.
        matrix: Matrix instructions, without doubles.
        has_tf32: Whether anything is computed with TF32.
        compile_s: What it took.
        failures: What the case promises and the code does not keep; empty: all is well.
    """

    op: str
    label: str
    target: str
    registers: int
    spill_bytes: int
    parked_scalars: int
    shared_bytes: int
    loads: Mapping[str, Mapping[int, int]]
    stores: Mapping[str, Mapping[int, int]]
    matrix: tuple[str, ...]
    has_tf32: bool
    compile_s: float
    failures: tuple[str, ...]


def refuse_interpreter() -> None:
    """Raises RuntimeError where Triton was imported as its interpreter, which compiles nothing."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are compiled in a process without it")


def examine(case: CompileCase) -> Finding:
    """Compiles a case, past Triton's cache, and holds its code against what it promises.

    A case that can't be compiled is a finding too, of zeros and that failure.

    Raises:
        RuntimeError: The process is one of Triton's interpreter.
        subprocess.CalledProcessError: A tool did not take the compiler's code.
    """
    refuse_interpreter()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        try:
            compiled = _compile(case)
        except Exception as error:  # noqa: BLE001 - the compiler raises what it likes
            lines = str(error).strip().splitlines() or [type(error).__name__]
            seconds = time.perf_counter() - start
            told = (f"does not compile: {lines[-1][:200]}",)
            return Finding(
                case.op, case.label, case.target.name, 0, 0, 0, 0, {}, {}, (), False, seconds, told
            )
    seconds = time.perf_counter() - start
    arguments = [
        name for name in case.kernel.arg_names if case.signature.get(name, "constexpr") != "constexpr"
    ]
    if case.target.backend == "cuda":
        code = compiled.asm["ptx"]
        accesses = ptx_accesses(code, arguments)
        parked_scalars = 0
        registers, spill_bytes = _cuda_registers(compiled.asm["cubin"])
    else:
        code = compiled.asm["amdgcn"]
        accesses = llvm_accesses(compiled.asm["llir"], arguments)
        registers, spill_bytes, parked_scalars = _rocm_registers(code)
    pointers = {name for name, kind in case.signature.items() if kind.startswith("*")}
    finding = Finding(
        op=case.op,
        label=case.label,
        target=case.target.name,
        registers=registers,
        spill_bytes=spill_bytes,
        parked_scalars=parked_scalars,
        shared_bytes=compiled.metadata.shared,
        loads=_widths(accesses, pointers, is_store=False),
        stores=_widths(accesses, pointers, is_store=True),
        matrix=tuple(sorted(set(_MATRIX.findall(code)))),
        has_tf32=_TF32.search(code) is not None,
        compile_s=seconds,
        failures=(),
    )
    return _judged(finding, case)


def _compile(case: CompileCase) -> "triton.compiler.CompiledKernel":
    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    wrong = sorted((case.signature.keys() | case.constants.keys() | case.divisible) - set(names))
    missing = [name for name in names if signature[name] == "constexpr" and name not in case.constants]
    if wrong or missing:
        raise ValueError(
            f"arguments that the kernel does not have: {wrong}, and that the case lacks: {missing}"
        )
    divisible = [
        at for at, name in enumerate(names) if name in case.divisible and signature[name] != "constexpr"
    ]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs=dict(case.constants),
        attrs={(at,): [["tt.divisibility", WIDE_BYTES]] for at in divisible},
    )
    return compile_source(
        source,
        target=GPUTarget(case.target.backend, case.target.arch, case.target.warp_size),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )


def _cuda_registers(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        told = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    if found is None:
        raise ValueError(f"cuobjdump tells of no registers: {told[:200]}")
    return int(found[1]), int(found[2]) + int(found[3])


def _rocm_registers(code: str) -> tuple[int, int, int]:
    """Vector registers and bytes of scratch of a thread, and scalars of a warp kept in vector registers."""

    def count(name: str) -> int:
        found = re.search(rf"^\s+\.{name}:\s+(\d+)$", code, re.MULTILINE)
        if found is None:
            raise ValueError(f"the code object has no {name}")
        return int(found[1])

    scratch = max(count("private_segment_fixed_size"), 4 * count("vgpr_spill_count"))
    return count("vgpr_count"), scratch, count("sgpr_spill_count")


def _widths(accesses: tuple[Access, ...], pointers: set[str], *, is_store: bool) -> dict[str, dict[int, int]]:
    found: dict[str, Counter[int]] = {}
    for access in accesses:
        if access.is_store is is_store:
            for name in sorted(access.arguments & pointers) or [_UNKNOWN]:
                found.setdefault(name, Counter())[access.num_bytes] += 1
    return {name: dict(sorted(widths.items())) for name, widths in sorted(found.items())}


def _judged(finding: Finding, case: CompileCase) -> Finding:
    failures = []
    if finding.spill_bytes:
        failures.append(f"spills {finding.spill_bytes} bytes")
    if finding.parked_scalars > PARKED_SCALARS:
        failures.append(f"parks {finding.parked_scalars} scalars, more than {PARKED_SCALARS}")
    if not finding.stores:
        # Triton 3.7.1 makes nothing of some kernels, and says nothing.
        failures.append("writes nothing")
    if finding.shared_bytes > case.target.shared_bytes:
        failures.append(f"shared memory {finding.shared_bytes} is over {case.target.shared_bytes} bytes")
    for name in sorted(case.wide):
        widths = finding.loads.get(name, {})
        if not widths:
            failures.append(f"no load of {name} was found")
        elif min(widths) < WIDE_BYTES:
            failures.append(f"loads of {name} are {min(widths)} bytes wide, not {WIDE_BYTES}")
    if case.wide and _UNKNOWN in finding.loads:
        failures.append(f"{sum(finding.loads[_UNKNOWN].values())} loads could not be told apart")
    others = [name for name in finding.matrix if not case.matrix or not name.startswith(case.matrix)]
    if case.matrix and len(others) == len(finding.matrix):
        failures.append(f"no {case.matrix}")
    if others:
        failures.append(f"{', '.join(others)} where {case.matrix or 'no matrix instruction'} was promised")
    if finding.has_tf32:
        failures.append("TF32")
    return replace(finding, failures=tuple(failures))
