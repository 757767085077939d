"""The C++ tests of `pagecast-native`: under sanitizers, and on ARM where compiler and emulator are there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pagecast_native
import pytest

SOURCE = Path(__file__).parents[3] / "worker" / "native"
BIN = Path(sys.executable).parent
EMULATOR = "qemu-aarch64"
CROSS = {
    "CMAKE_SYSTEM_NAME": "Linux",
    "CMAKE_SYSTEM_PROCESSOR": "aarch64",
    "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
    "CMAKE_CROSSCOMPILING_EMULATOR": EMULATOR,
    "CMAKE_EXE_LINKER_FLAGS": "-static",
}
HAS_CROSS = all(shutil.which(name) for name in (CROSS["CMAKE_CXX_COMPILER"], EMULATOR))


def run(*command: str) -> str:
    """Runs one of the build tools of this environment and returns what it printed."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, check=False, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


def build(folder: Path, **options: str) -> None:
    """Configures and builds the test programs alone."""
    settings = {"PAGECAST_NATIVE_MODULE": "OFF", "PAGECAST_NATIVE_TESTS": "ON", **options}
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    run("cmake", "-S", str(SOURCE), "-B", str(folder), "-G", "Ninja", *definitions)
    run("cmake", "--build", str(folder))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizers", ["address,undefined", pytest.param("thread", marks=pytest.mark.long)])
def test_sanitizers_find_nothing(tmp_path: Path, sanitizers: str) -> None:
    # One set of wide registers beside the baseline: the others are the same sources.
    has_wide = "avx512vnni" in pagecast_native.kernel_sets()
    left_out = "avx2;avx2vnni" if has_wide else "avx512;avx512vnni;avx512amx"
    build(
        tmp_path,
        PAGECAST_NATIVE_SANITIZE=sanitizers,
        PAGECAST_NATIVE_LEFT_OUT=left_out,
        CMAKE_BUILD_TYPE="RelWithDebInfo",
    )
    assert "100% tests passed" in run("ctest", "--test-dir", str(tmp_path))


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_CROSS, reason="needs a cross compiler for AArch64 and qemu-user")
def test_arm_gives_the_bits_of_x86(tmp_path: Path) -> None:
    """The one build of every set: all C++ tests run in it, too."""
    digests = {}
    for name, options in (("here", {}), ("arm", CROSS)):
        build(tmp_path / name, **options)
        emulator = [EMULATOR] if options else []
        printed = run(*emulator, str(tmp_path / name / "print_digest"))
        digests |= dict(re.findall(r"^(\w+) +([0-9a-f]{16})$", printed, re.MULTILINE))
    for name in ("here", "arm"):
        assert "100% tests passed" in run("ctest", "--test-dir", str(tmp_path / name))
    fused = {name: digest for name, digest in digests.items() if name != "baseline"}
    assert "neon" in fused
    assert len(set(fused.values())) == 1, digests
