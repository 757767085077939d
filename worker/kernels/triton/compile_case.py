"""One kernel as it would be compiled for a target, as a value. Knows no kernel and no compiler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.kernels.triton.targets import Target


@dataclass(frozen=True, slots=True)
class CompileCase:
    """What the compiler is given, and what its output must show.

    Every op's module lists its cases (`compile_cases(target)`), made by the same functions that its launcher
    takes its constants from.

    Attributes:
        op: Module of the kernel, e.g. `linear`.
        label: Tells the op's cases apart, e.g. `decode bfloat16, 4 x 16 tokens`.
        target: What for.
        kernel: The function under `triton.jit`.
        signature: Type of every argument that is no constant, in the compiler's words: `*bf16`, `i32`.
        constants: Value of every compile-time argument.
        divisible: Arguments known to be multiples of 16 (pointers: of 16 bytes).
        num_warps: Warps of a program.
        num_stages: Loads in flight.
        is_named: Whether the case is of the set that covers every kernel, class and target; the others are
            compiled in the long tests only.
        wide: Names of pointers whose loads must be 16 bytes wide, KV and weights.
        matrix: Instruction that must occur, as the start of its name in the compiler's output
            (`mma.sync.aligned.m16n8k16`, `wgmma.mma_async.sync.aligned.m64n64k16`, `v_mfma_f32_16x16x16`);
            empty: none may.
    """

    op: str
    label: str
    target: Target
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: frozenset[str]
    num_warps: int
    num_stages: int
    is_named: bool
    wide: frozenset[str] = field(default_factory=frozenset)
    matrix: str = ""
