"""The report over kernels that are as they should be, over some made worse on purpose, and over our own.

Each report is a process of its own: this one may not have imported triton as a compiler.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.kernel_accesses import llvm_accesses, ptx_accesses
from worker.kernels.triton.targets import TARGETS

ROOT = Path(__file__).parents[2]
needs_triton = [
    pytest.mark.triton,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the extra `triton` is not installed"
    ),
]
GOOD, WORSE = "tests.bench.good_kernels", "tests.bench.worse_kernels"


def report(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "bench", "kernel-report", *arguments],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


def cases(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.stdout)["cases"]
    return found


class TestOnOtherKernels:
    pytestmark = needs_triton

    def test_good_kernels_pass_on_every_target(self) -> None:
        result = report("--package", GOOD, "--check", "--json", "--jobs", "1")
        assert (result.returncode, result.stderr) == (0, "")
        found = cases(result)
        assert [case["target"] for case in found] == list(TARGETS)
        for case in found:
            assert case["failures"] == []
            assert case["loads"]["w_ptr"].keys() == case["loads"]["x_ptr"].keys() == {"16"}
            assert case["loads"]["row_ptr"].keys() == {"4"}
            assert case["stores"].keys() == {"out_ptr"}
            assert case["registers"] > 32
            assert len(case["matrix"]) == 1

    def test_a_kernel_made_worse_fails_by_what_was_made_worse(self) -> None:
        result = report("--package", WORSE, "--check", "--json", "--jobs", "2")
        assert (result.returncode, result.stderr) == (1, "")
        found = cases(result)
        assert len(found) == 4 * 8
        for case in found:
            told = [failure for failure in case["failures"] if case["label"] in failure]
            assert told, f"{case['target']} {case['label']}: {case['failures']}"
        failures = json.loads(result.stdout)["failures"]
        assert [line for line in failures if "forgotten_kernel" in line] == [
            f"{target} product forgotten_kernel: no case compiles it" for target in TARGETS
        ]

    def test_without_check_it_tells_and_ends_well(self) -> None:
        result = report(
            "--package", WORSE, "--target", "sm_90", "--op", "product", "--jobs", "1", COLUMNS="250"
        )
        assert (result.returncode, result.stderr) == (0, "")
        lines = result.stdout.splitlines()
        assert sum(line.startswith("FAIL sm_90 product, ") for line in lines) >= 8
        assert sum("│ FAIL │" in line for line in lines) == 8
        assert lines[-1].startswith("8 cases, ")

    def test_every_case_is_more_than_the_named_ones(self) -> None:
        result = report("--package", GOOD, "--target", "sm_80", "--all", "--json", "--jobs", "1")
        assert [case["label"] for case in cases(result)] == ["bfloat16", "float16"]

    @pytest.mark.parametrize(
        ("arguments", "environment", "told"),
        [
            (("--target", "sm_10"), {}, "targets ['sm_10'] are none of sm_80, sm_90, sm_100, gfx942"),
            (("--package", GOOD, "--op", "lin"), {}, "op ['lin']: kernels are in product"),
            ((), {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET is set"),
        ],
    )
    def test_what_can_not_be_reported_is_refused(
        self, arguments: tuple[str, ...], environment: dict[str, str], told: str
    ) -> None:
        result = report(*arguments, "--check", **environment)
        assert (result.returncode, result.stdout) == (1, "")
        assert told in result.stderr


class TestOwnKernels:
    pytestmark = needs_triton

    @pytest.mark.timeout(900)
    def test_named_cases_keep_what_they_promise(self) -> None:
        result = report("--check", "--jobs", "2", "--json")
        assert json.loads(result.stdout)["failures"] == []
        assert (result.returncode, result.stderr) == (0, "")
        assert {case["target"] for case in cases(result)} == TARGETS.keys()

    @pytest.mark.long
    @pytest.mark.timeout(3600)
    def test_every_case_keeps_what_it_promises(self) -> None:
        for target in TARGETS:
            result = report("--check", "--jobs", "2", "--json", "--all", "--target", target)
            assert json.loads(result.stdout)["failures"] == []
            assert result.returncode == 0


def test_ptx_addresses_are_followed_through_loops_and_not_through_memory() -> None:
    ptx = """
.visible .entry k(
    .param .u64 .ptr .global .align 1 k_param_0,
)
{
    ld.param.b64 \t%rd1, [k_param_0];
    ld.param.b64 \t%rd2, [k_param_1];
    ld.param.b32 \t%r9, [k_param_2];
    // begin inline asm
    ld.global.b32 { %r1 }, [ %rd1 + 0 ];
    // end inline asm
    mul.wide.s32 \t%rd3, %r1, %r9;
    mov.b64 \t%rd6, %rd2;
$L__BB0_1:
    add.s64 \t%rd5, %rd6, %rd3;
    @%p1 ld.global.L1::evict_last.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd5 + 16 ];
    cp.async.cg.shared.global [ %r6 + 0 ], [ %rd5 + 0 ], 0x10, %r7;
    add.s64 \t%rd6, %rd5, 64;
    bra.uni \t$L__BB0_1;
    ld.global.b16 %rs1, [ %rd6 + 2 ];
    ld.shared.b64 %rd8, [ %r6 ];
    st.global.v2.b64 [ %rd8 + 0 ], { %rd1, %rd2 };
}"""
    found = [
        (sorted(access.arguments), access.num_bytes, access.is_store)
        for access in ptx_accesses(ptx, ["table", "keys", "stride"])
    ]
    assert found == [
        (["table"], 4, False),
        (["keys", "stride"], 16, False),
        (["keys", "stride"], 16, False),
        (["keys", "stride"], 2, False),
        ([], 16, True),
    ]


def test_llvm_addresses_are_followed_through_phis_and_buffers() -> None:
    llir = """
define amdgpu_kernel void @k(ptr addrspace(1) inreg captures(none) %0, ptr addrspace(1) %1, i32 %2) {
  %4 = load <1 x i32>, ptr addrspace(1) %0, align 4, !dbg !18
  %5 = extractelement <1 x i32> %4, i64 0
  %6 = sext i32 %5 to i64
br:
  %7 = phi ptr addrspace(1) [ %8, %br ], [ %1, %entry ]
  %8 = getelementptr i8, ptr addrspace(1) %7, i64 %6
  %9 = load <8 x bfloat>, ptr addrspace(1) %8, align 16
  store <4 x bfloat> %9, ptr addrspace(3) %10, align 8
  store <2 x half> splat (half 0.0), ptr addrspace(1) %8, align 4
  %11 = call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %0, i16 0, i64 7, i32 1)
  %12 = tail call <4 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v4i32(ptr addrspace(8) %11, i32 0, i32 0)
  tail call void @llvm.amdgcn.raw.ptr.buffer.store.v2i32(<2 x i32> %13, ptr addrspace(8) %11, i32 0, i32 0)
  call void @llvm.amdgcn.raw.ptr.buffer.load.lds(ptr addrspace(8) %11, ptr addrspace(3) %14, i32 4, i32 0)
}"""
    found = [
        (sorted(access.arguments), access.num_bytes, access.is_store)
        for access in llvm_accesses(llir, ["table", "keys", "stride"])
    ]
    assert found == [
        (["table"], 4, False),
        (["keys"], 16, False),
        (["keys"], 4, True),
        (["table"], 16, False),
        (["table"], 8, True),
        (["table"], 4, False),
    ]
