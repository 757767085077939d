"""What weights, keys and values are kept as, and the fingerprint that tells workers apart."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny_model import write_tiny_gguf
from worker.kernel_choice import Kernels, SettingRefused
from worker.model.weights.gguf import GgufFile, read_gguf
from worker.numerics import choose_kv_dtype, choose_weights, fingerprint

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NATIVE = Kernels("native", "avx2", ("cpu", "fma", "native-1"))
REFERENCE = Kernels("reference", "", ("cpu", "avx2", "reference"))
INTERPRETED = Kernels("triton", "interpreter", ("cpu", "avx2", "numpy-2", "triton-3.7.1", "kernels-1"))
COMPILED = Kernels("triton", "sm_90", ("sm_90", "triton-3.7.1", "kernels-1"))


@pytest.mark.parametrize(
    ("wanted", "kernels", "device", "weights"),
    [
        ("auto", NATIVE, CPU, "float32"), ("auto", REFERENCE, CPU, "float32"),
        ("auto", INTERPRETED, CPU, "float32"), ("auto", COMPILED, GPU, "file"),
        ("float32", NATIVE, CPU, "float32"), ("file", INTERPRETED, CPU, "file"),
        ("float16", INTERPRETED, CPU, "float16"), ("bfloat16", COMPILED, GPU, "bfloat16"),
    ],
)  # fmt: skip
def test_weights(wanted: str, kernels: Kernels, device: torch.device, weights: str) -> None:
    assert choose_weights(wanted, kernels, device) == weights  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "kernels", "device", "kinds", "dtype"),
    [
        ("auto", NATIVE, CPU, ("float32",), torch.float32),
        ("auto", INTERPRETED, CPU, ("float16",), torch.float32),
        ("auto", COMPILED, GPU, ("q4_0", "q8_0"), torch.bfloat16),
        ("auto", COMPILED, GPU, ("float16", "q8_0"), torch.float16),
        ("auto", COMPILED, GPU, ("bfloat16", "float16"), torch.bfloat16),
        ("float8_e4m3fn", COMPILED, GPU, (), torch.float8_e4m3fn),
        ("float8_e4m3fn", INTERPRETED, CPU, (), torch.float8_e4m3fn),
        ("float32", REFERENCE, CPU, (), torch.float32),
    ],
)
def test_keys_and_values(
    wanted: str, kernels: Kernels, device: torch.device, kinds: tuple[str, ...], dtype: torch.dtype
) -> None:
    assert choose_kv_dtype(wanted, kernels, device, kinds) == dtype  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flag", "wanted", "kernels", "told"),
    [
        ("weights", "file", NATIVE, "--weights file needs --kernels triton, native takes float32 only"),
        ("weights", "bfloat16", INTERPRETED, "--weights bfloat16 needs --device cuda"),
        ("kv", "float8_e4m3fn", NATIVE, "--kv-dtype float8_e4m3fn needs --kernels triton, native takes"),
        ("kv", "float16", REFERENCE, "--kv-dtype float16 needs --kernels triton, reference takes"),
        ("kv", "bfloat16", INTERPRETED, "--kv-dtype bfloat16 needs --device cuda"),
    ],
)
def test_what_cannot_be_had_names_its_flag(flag: str, wanted: str, kernels: Kernels, told: str) -> None:
    def choose() -> object:
        if flag == "weights":
            return choose_weights(wanted, kernels, CPU)  # type: ignore[arg-type]
        return choose_kv_dtype(wanted, kernels, CPU, ())  # type: ignore[arg-type]

    with pytest.raises(SettingRefused, match=f"^{told}"):
        choose()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", formats="Q8_0")
    return read_gguf(path, weights="file")


def test_a_fingerprint_says_what_bits_depend_on(file: GgufFile) -> None:
    said = fingerprint(COMPILED, file, torch.bfloat16, GPU)
    assert said.startswith("sm_90/triton-3.7.1/kernels-1/")
    assert said.endswith(
        "/weights-q8_0/products-bfloat16/context-1024/activations-float32/kv-bfloat16/" + file.fingerprint
    )
    assert "/products-float32/" in fingerprint(INTERPRETED, file, torch.float32, CPU)
    others = {
        said,
        fingerprint(COMPILED, file, torch.float8_e4m3fn, GPU),
        fingerprint(
            replace(COMPILED, numerics=("sm_80", "triton-3.7.1", "kernels-1")), file, torch.bfloat16, GPU
        ),
        fingerprint(COMPILED, replace(file, fingerprint="0" * 16), torch.bfloat16, GPU),
    }
    assert len(others) == 4


def test_native_and_reference_say_what_they_said(tmp_path: Path) -> None:
    plain = read_gguf(write_tiny_gguf(tmp_path / "plain.gguf"))
    tail = f"weights-float32/activations-float32/kv-float32/{plain.fingerprint}"
    assert fingerprint(NATIVE, plain, torch.float32, CPU).endswith(tail)
    assert "torch" not in fingerprint(NATIVE, plain, torch.float32, CPU)
    assert fingerprint(REFERENCE, plain, torch.float32, CPU).endswith(f"/torch-{torch.__version__}/{tail}")
