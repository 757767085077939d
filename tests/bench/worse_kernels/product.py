"""Kernels made worse on purpose, one way each; what the report must say of each is its label."""
# ruff: noqa: N803 - compile-time parameters are upper case, as Triton's own are

from dataclasses import replace

import triton
import triton.language as tl

from tests.bench.good_kernels.product import MATRIX, case
from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.targets import Target


@triton.jit
def spilling_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    """Holds more values than a thread has registers, since their sum comes before their use."""
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.exp(x) - tl.sum(x, 0))


@triton.jit
def dotless_kernel(x_ptr, w_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The product by sums, which no matrix unit does."""
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    x = tl.load(x_ptr + m[:, None, None] * K + k[None, None, :]).to(tl.float32)
    w = tl.load(w_ptr + n[None, :, None] * K + k[None, None, :]).to(tl.float32)
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.sum(x * w, 2))


@triton.jit
def parking_kernel(x_ptr, out_ptr, rounds, COUNT: tl.constexpr):
    """More numbers of a program go through its loop than there are scalar registers."""
    program = tl.program_id(0)
    numbers = ()
    for index in tl.static_range(COUNT):
        numbers = numbers + (program * (program + index) // (index + 3),)  # noqa: RUF005 - as Triton has it
    at = tl.arange(0, 256)
    x = tl.load(x_ptr + at)
    for _ in range(rounds):
        for index in tl.static_range(COUNT):
            x = (x ^ numbers[index]) * 3
    tl.store(out_ptr + at, x)


@triton.jit
def silent_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    """Computes and stores nothing of it: what is left is empty."""
    at = tl.arange(0, SIZE)
    if SIZE == 0:
        tl.store(out_ptr + at, tl.load(x_ptr + at))


@triton.jit
def forgotten_kernel(x_ptr):
    """No case compiles it."""
    tl.store(x_ptr, 0.0)


def compile_cases(target: Target) -> list[CompileCase]:
    good = case(target, "", matrix=MATRIX[target.name])
    strides = {"x_ptr", "w_ptr", "row_ptr", "out_ptr", "x_stride"}
    return [
        replace(
            good,
            label="spills",
            kernel=spilling_kernel,
            signature={"x_ptr": "*fp32", "out_ptr": "*fp32"},
            constants={"SIZE": 65536 if target.backend == "hip" else 16384},
            num_warps=1,
            wide=frozenset({"x_ptr"}),
            divisible=frozenset({"x_ptr", "out_ptr"}),
            matrix="",
        ),
        case(
            target,
            "loads of w_ptr are 2 bytes wide",
            matrix=MATRIX[target.name],
            divisible=frozenset(strides),
        ),
        replace(
            good,
            label=f"no {MATRIX[target.name]}",
            kernel=dotless_kernel,
            signature={"x_ptr": "*bf16", "w_ptr": "*bf16", "out_ptr": "*fp32"},
            constants={"M": 4, "N": 16, "K": 64},
            divisible=frozenset({"x_ptr", "w_ptr", "out_ptr"}),
        ),
        case(target, "where no matrix instruction was promised", matrix=""),
        case(target, "shared memory", matrix=MATRIX[target.name][:9], sizes=(128, 128, 64), num_stages=9),
        *(
            [case(target, "TF32", matrix="", dtype="fp32", precision="tf32", sizes=(16, 64, 64))]
            if target.backend == "cuda"
            else []
        ),
        *(
            [
                replace(
                    good,
                    label="parks",
                    kernel=parking_kernel,
                    signature={"x_ptr": "*i32", "out_ptr": "*i32", "rounds": "i32"},
                    constants={"COUNT": 160},
                    divisible=frozenset(),
                    wide=frozenset(),
                    matrix="",
                )
            ]
            if target.backend == "hip"
            else []
        ),
        replace(
            good,
            label="writes nothing",
            kernel=silent_kernel,
            signature={"x_ptr": "*fp32", "out_ptr": "*fp32"},
            constants={"SIZE": 1024},
            divisible=frozenset({"x_ptr", "out_ptr"}),
            wide=frozenset(),
            matrix="",
        ),
        replace(good, label="does not compile", constants={**good.constants, "BLOCK_K": 7}),
    ]
