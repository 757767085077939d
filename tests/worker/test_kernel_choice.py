"""Which device and kernels a worker takes on machines that this one is not."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from worker import kernel_choice
from worker.kernel_choice import KernelsMissing, SettingRefused, choose_device, choose_kernels, passed_over
from worker.model.config import LlamaConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
H100 = {"shared_memory_per_block_optin": 227 * 1024, "gcnArchName": ""}
CONFIG = LlamaConfig(2, 64, 128, 4, 2, 16, 300, 1024, 1e4, 1e-5)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one H100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**H100))
    return monkeypatch


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("wanted", "kernels", "device"),
    [
        ("auto", "auto", GPU), ("auto", "triton", GPU), ("cuda", "auto", GPU), ("cuda", "triton", GPU),
        ("auto", "native", CPU), ("auto", "reference", CPU), ("cpu", "auto", CPU), ("cpu", "triton", CPU),
    ],
)  # fmt: skip
def test_a_gpu_is_taken_where_kernels_can_use_it(wanted: str, kernels: str, device: torch.device) -> None:
    assert choose_device(wanted, kernels) == device  # type: ignore[arg-type]


def test_without_a_gpu_only_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", "auto") == choose_device("auto", "triton") == CPU
    assert passed_over("auto", "auto") == passed_over("cpu", "triton") == passed_over("auto", "native") == ""
    assert passed_over("auto", "triton").endswith("finds no such device")
    with pytest.raises(SettingRefused, match=r"^--device cuda: torch .* finds no such device$"):
        choose_device("cuda", "auto")
    with pytest.raises(SettingRefused, match=r"^--device cuda: --kernels native runs on the CPU only$"):
        choose_device("cuda", "native")


def test_an_old_gpu_is_none(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_device("auto", "auto") == CPU
    assert passed_over("auto", "auto") == "compute capability 7.5 is below 8.0"
    with pytest.raises(SettingRefused, match=r"^--device cuda: compute capability 7.5 is below 8.0$"):
        choose_device("cuda", "triton")


def test_a_gpu_that_kernels_do_not_fit_is_none(gpu: pytest.MonkeyPatch) -> None:
    small = SimpleNamespace(shared_memory_per_block_optin=99 * 1024, gcnArchName="gfx1100")
    gpu.setattr(torch.cuda, "get_device_properties", lambda device: small)
    assert choose_device("auto", "auto") == CPU
    with pytest.raises(SettingRefused, match=r"capability 9.0 has 101376 bytes .* 232448$"):
        choose_device("cuda", "triton")
    gpu.setattr(torch.version, "hip", "7.0")
    assert passed_over("auto", "auto") == "there are no kernels for gfx1100, only for gfx942"


def test_a_gpu_without_triton_is_none(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(kernel_choice, "find_spec", lambda name: None)
    assert choose_device("auto", "auto") == CPU
    with pytest.raises(SettingRefused, match=r"pip install '.\[triton\]'"):
        choose_device("cuda", "auto")
    # Asked for by name, it is the package that is missing.
    assert choose_device("auto", "triton") == GPU
    assert passed_over("auto", "triton") == "" != passed_over("auto", "auto")
    with pytest.raises(KernelsMissing, match=r"pip install '.\[triton\]'"):
        choose_kernels("triton", CONFIG, 16, GPU)


@pytest.mark.parametrize("wanted", ["native", "reference"])
def test_kernels_of_the_cpu_are_none_of_a_gpu(wanted: str) -> None:
    with pytest.raises(
        SettingRefused, match=f"^--kernels {wanted} runs on --device cpu only, not on cuda:0$"
    ):
        choose_kernels(wanted, CONFIG, 16, GPU)  # type: ignore[arg-type]


def test_on_a_cpu_auto_never_takes_the_interpreter() -> None:
    assert choose_kernels("auto", CONFIG, 16, CPU).name == "native"
    assert choose_kernels("reference", CONFIG, 16).numerics[-1] == "reference"


# triton is imported here, so each in a process of its own.
CHILD = """
import os, sys, torch
from tests.worker.test_kernel_choice import CONFIG, CPU, GPU
from worker.kernel_choice import choose_kernels
from worker.kernels.triton import prepare_triton
if sys.argv[1] == "cpu":
    chosen = choose_kernels("triton", CONFIG, 16, CPU)
    from triton import knobs
    assert os.environ["TRITON_INTERPRET"] == "1" and knobs.runtime.interpret
    try:
        prepare_triton(GPU)
    except RuntimeError as error:
        assert str(error).startswith("TRITON_INTERPRET is set"), error
    else:
        raise AssertionError("the interpreter passes for a GPU")
else:
    torch.cuda.get_device_capability = lambda device: (8, 9)
    chosen = choose_kernels("auto", CONFIG, 16, GPU)
    assert "TRITON_INTERPRET" not in os.environ
    try:
        prepare_triton(CPU)
    except RuntimeError as error:
        assert "imported before prepare_triton" in str(error), error
    else:
        raise AssertionError("a compiler passes for the interpreter")
print(chosen.name, chosen.kernel_set, "/".join(chosen.numerics))
"""


@pytest.mark.triton
@pytest.mark.skipif(find_spec("triton") is None, reason="the extra `triton` is not installed")
@pytest.mark.parametrize(("device", "kernel_set"), [("cpu", "interpreter"), ("cuda", "sm_89")])
def test_triton_is_prepared_for_its_device_and_says_which(
    device: str, kernel_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, device],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    name, found, numerics = done.stdout.split()
    assert (name, found) == ("triton", kernel_set)
    first, *_, triton, kernels = numerics.split("/")
    assert first == ("cpu" if device == "cpu" else "sm_89")
    assert triton.startswith("triton-3")
    assert kernels.startswith("kernels-")
