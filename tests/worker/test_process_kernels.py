"""Which kernels `python -m worker` takes, what it logs and tells of them, and how it refuses."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pagecast_native
import pytest
import torch

from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.tiny_model import write_tiny_gguf

# A worker on a machine where the distribution is not installed.
WITHOUT_NATIVE = """
import sys
sys.modules["pagecast_native"] = None
from worker.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Writes a model of a head size; native kernels take multiples of 16 up to 256."""

    def write(head_size: int) -> Path:
        path = tmp_path_factory.mktemp("model") / "sized.gguf"
        return write_tiny_gguf(path, head_size=head_size, num_heads=2, num_kv_heads=1)

    return write


def command(model: Path, folder: Path, *flags: str, has_native: bool = True) -> list[str]:
    start = ["-m", "worker"] if has_native else ["-c", WITHOUT_NATIVE]
    return [sys.executable, *start, "--model", str(model), "--listen", f"unix:{folder}/w.sock", *flags]


def started(words: list[str], folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Run a worker until it is ready: its events so far, and its fingerprint."""
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    events: list[dict[str, Any]] = []
    try:
        while not events or events[-1]["event"] != "worker_ready":
            events.append(json.loads(process.stderr.readline()))
        with grpc.insecure_channel(f"unix:{folder}/w.sock") as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            info = stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=5.0)
    finally:
        process.terminate()
        assert process.wait(20) == 0
        process.stderr.close()
    return events, info.model.numerics_fingerprint


@pytest.mark.parametrize("wanted", ["auto", "native"])
def test_native_kernels_run_where_they_can(wanted: str, tiny: Path, tmp_path: Path) -> None:
    flags = ("--kernels", wanted, "--threads", "2")
    (ready,), fingerprint = started(command(tiny, tmp_path, *flags), tmp_path)
    kernel_set = pagecast_native.default_kernel_set()
    assert (ready["kernels"], ready["kernel_set"], ready["threads"]) == ("native", kernel_set, 2)
    assert (ready["device"], ready["weights"], ready["kv_dtype"]) == ("cpu", "float32", "float16")
    assert (ready["activations"], ready["kv_bytes"]) == ("float32", 1024 * 2 * 2 * 2 * 16 * 16 * 2)
    assert (ready["num_kv_blocks"], ready["max_step_tokens"], ready["max_step_rows"]) == (1024, 64, 32)
    rounding = "fma" if pagecast_native.is_fused(kernel_set) else "nofma"
    numerics = (
        f"cpu/{rounding}/native-{pagecast_native.KERNEL_VERSION}/{version('pagecast')}/weights-float32/"
    )
    assert fingerprint.startswith(numerics)
    # Nothing that native kernels compute comes from torch.
    assert "torch" not in fingerprint


def test_the_largest_heads_are_native_ones(sized: Callable[[int], Path], tmp_path: Path) -> None:
    words = command(sized(pagecast_native.MAX_HEAD_SIZE), tmp_path, "--threads", "1")
    (ready,), _ = started(words, tmp_path)
    assert ready["kernels"] == "native"


@pytest.mark.parametrize(
    ("head_size", "reason"), [(16, "pip install ./worker/native"), (8, "head_size=8"), (272, "head_size=272")]
)
def test_auto_falls_back_to_the_reference_and_says_why(
    head_size: int, reason: str, sized: Callable[[int], Path], tmp_path: Path
) -> None:
    words = command(sized(head_size), tmp_path, "--threads", "1", has_native=head_size != 16)
    (fallback, ready), fingerprint = started(words, tmp_path)
    assert (fallback["event"], fallback["level"]) == ("kernels_fallback", "warning")
    assert fallback["kernels"] == "reference"
    assert reason in fallback["reason"]
    assert (ready["kernels"], ready["kernel_set"]) == ("reference", "")
    capability = torch.backends.cpu.get_cpu_capability().lower()
    numerics = f"cpu/{capability}/reference/{version('pagecast')}/torch-{torch.__version__}/weights-float32/"
    assert fingerprint.startswith(numerics)


@pytest.mark.parametrize(
    ("head_size", "status", "told"),
    [(16, 6, "pip install ./worker/native"), (8, 5, "head_size=8"), (272, 5, "head_size=272")],
)
def test_native_that_cannot_be_had_ends_the_start(
    head_size: int, status: int, told: str, sized: Callable[[int], Path], tmp_path: Path
) -> None:
    words = command(sized(head_size), tmp_path, "--kernels", "native", has_native=head_size != 16)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    (line,) = done.stderr.splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"]) == ("worker_failed", "error")
    assert told in event["error"]
    assert "exception" not in event


def test_the_reference_needs_no_native(tiny: Path, tmp_path: Path) -> None:
    words = command(tiny, tmp_path, "--kernels", "reference", has_native=False)
    (ready,), _ = started(words, tmp_path)
    assert ready["kernels"] == "reference"
