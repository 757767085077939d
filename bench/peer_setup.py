"""`pagecast bench peers --set-up`: puts the other engines into a folder, each in an environment of its own.

None of them is a dependency of Pagecast. Needs the package index, cmake and a C++ compiler, takes gigabytes
and, for llama.cpp, some ten minutes. What is there already stays. Knows command lines and where things go.
"""

import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import peer_export
from bench.peers import Places

LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
"""Its source package holds llama.cpp."""
REQUIREMENTS = {
    "openvino": ("openvino-genai==2026.4.1.0",),
    "transformers": ("torch==2.13.0", "transformers==5.24.0", "gguf"),
    "onnxruntime": ("onnxruntime-genai==0.18.0", "torch==2.13.0", "transformers==5.24.0", "onnx", "onnx_ir"),
}
_PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize")
_LLAMA_WEIGHTS = ("Q4_0", "Q8_0", "F32")
# What ggml can be built for, by the names of /proc/cpuinfo. Named one by one and not found by the compiler:
# it would take AMX, and llama.cpp's code for it crashed on the machine whose figures docs/performance.md has.
_GGML_FLAGS = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
}


class SetUpFailed(Exception):
    """A command failed, or a tool is missing; the message says which."""


def set_up(places: Places, say: Callable[[str], None]) -> list[str]:
    """Makes what is missing.

    Args:
        places: Where it goes.
        say: Told of each thing before it is made.

    Returns:
        What could not be had, a line each; the rest is there.
    """
    places.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    # In this order: each may need what came before it.
    for what, make in (
        ("llama.cpp and its weights", _make_llama_cpp),
        ("OpenVINO GenAI", lambda at: _make_environment(at, "openvino")),
        ("transformers and float32 weights", _make_transformers),
        ("onnxruntime-genai and its weights", _make_onnxruntime),
    ):
        say(what)
        try:
            make(places)
        except (SetUpFailed, OSError) as error:
            failed.append(f"{what}: {error}")
    return failed


def ggml_options(cpu_flags: Sequence[str], machine: str) -> list[str]:
    """Options of cmake that build ggml for a CPU of these flags; on aarch64 the compiler knows best."""
    if machine not in ("x86_64", "AMD64"):
        return ["-DGGML_NATIVE=ON"]
    return [
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{name}={'ON' if flag in cpu_flags else 'OFF'}" for flag, name in _GGML_FLAGS.items()),
    ]


def _make_llama_cpp(places: Places) -> None:
    built = places.llama_cpp
    if not all((built / program).is_file() for program in _PROGRAMS):
        cmake = _tool("cmake")
        source = _llama_source(places.folder / "source")
        build = source / "build"
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
        options += ["-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_SERVER=OFF"]
        options += ggml_options(_cpu_flags(), platform.machine())
        _run([cmake, "-S", str(source), "-B", str(build), *options])
        jobs = str(len(os.sched_getaffinity(0)))
        _run([cmake, "--build", str(build), "-j", jobs, "--target", *_PROGRAMS])
        built.mkdir(exist_ok=True)
        for program in _PROGRAMS:
            shutil.copy2(build / "bin" / program, built / program)
    for name in _LLAMA_WEIGHTS:
        target = places.weights(name)
        if not target.is_file():
            part = target.with_suffix(".part")
            quantise = [str(built / "llama-quantize"), "--allow-requantize", str(places.model)]
            _run([*quantise, str(part), name])
            part.rename(target)


def _llama_source(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    fetch = ["-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    _run([sys.executable, *fetch, LLAMA_CPP_PYTHON])
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"


def _make_environment(places: Places, name: str) -> None:
    python = places.python(name)
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(places.folder / name)])
    _run([str(python), "-m", "pip", "install", "-q", *REQUIREMENTS[name]])


def _make_transformers(places: Places) -> None:
    _make_environment(places, "transformers")
    if not places.float32_folder.exists():
        part = places.float32_folder.with_suffix(".part")
        python = str(places.python("transformers"))
        _run([python, "-P", str(Path(peer_export.__file__)), str(places.model), str(part)])
        part.rename(places.float32_folder)


def _make_onnxruntime(places: Places) -> None:
    _make_environment(places, "onnxruntime")
    for weights, precision in (("Q4_0", "int4"), ("F32", "fp32")):
        target = places.onnx(weights)
        if target.exists():
            continue
        if not places.float32_folder.exists():
            raise SetUpFailed(f"{places.float32_folder} is not there, of which its weights are made")
        part = target.with_suffix(".part")
        build = [str(places.python("onnxruntime")), "-m", "onnxruntime_genai.models.builder"]
        build += ["-i", str(places.float32_folder), "-o", str(part), "-p", precision, "-e", "cpu"]
        build += ["-c", str(places.folder / "cache"), "--extra_options", "hf_token=false"]
        _run(build)
        part.rename(target)


def _tool(name: str) -> str:
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join((beside, os.defpath))) or shutil.which(name)
    if found is None:
        raise SetUpFailed(f"{name} is not installed; in the repository: pip install '.[dev]'")
    return found


def _cpu_flags() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return line.partition(":")[2].split()
    return []


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise SetUpFailed(f"{' '.join(command[:3])} …: exit code {done.returncode}: {lines[-1]}")
