"""What weights, keys and values are kept as, and the fingerprint that tells workers apart."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny_model import write_tiny_gguf
from worker.kernel_choice import Kernels, SettingRefused
from worker.model.weights.gguf import GgufFile, read_gguf
from worker.numerics import choose_activations, choose_kv_dtype, choose_weights, fingerprint, step_tokens

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NATIVE = Kernels("native", "avx2", ("cpu", "fma", "native-1"))
REFERENCE = Kernels("reference", "", ("cpu", "avx2", "reference"))
INTERPRETED = Kernels("triton", "interpreter", ("cpu", "avx2", "numpy-2", "triton-3.7.1", "kernels-1"))
COMPILED = Kernels("triton", "sm_90", ("sm_90", "triton-3.7.1", "kernels-1"))


@pytest.mark.parametrize(
    ("wanted", "kernels", "device", "weights"),
    [
        ("auto", NATIVE, CPU, "file"), ("auto", REFERENCE, CPU, "float32"),
        ("auto", INTERPRETED, CPU, "float32"), ("auto", COMPILED, GPU, "file"),
        ("float32", NATIVE, CPU, "float32"), ("file", INTERPRETED, CPU, "file"),
        ("bfloat16", NATIVE, CPU, "bfloat16"), ("float16", NATIVE, CPU, "float16"),
        ("float16", INTERPRETED, CPU, "float16"), ("bfloat16", COMPILED, GPU, "bfloat16"),
    ],
)  # fmt: skip
def test_weights(wanted: str, kernels: Kernels, device: torch.device, weights: str) -> None:
    assert choose_weights(wanted, kernels, device) == weights  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "kernels", "device", "kinds", "dtype"),
    [
        ("auto", NATIVE, CPU, ("bfloat16",), torch.float16),
        ("auto", REFERENCE, CPU, ("float32",), torch.float32),
        ("int8", NATIVE, CPU, (), torch.int8),
        ("bfloat16", NATIVE, CPU, (), torch.bfloat16),
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
    ("wanted", "kernels", "kinds", "activations"),
    [
        ("auto", NATIVE, ("bfloat16", "q4_1"), "int8"), ("auto", NATIVE, ("q6_k",), "int8"),
        ("auto", NATIVE, ("bfloat16", "float32"), "float32"), ("int8", NATIVE, ("q8_0",), "int8"),
        ("float32", NATIVE, ("q8_0",), "float32"), ("float32", COMPILED, ("q8_0",), "float32"),
        ("auto", COMPILED, ("q8_0",), "float32"), ("auto", REFERENCE, ("float32",), "float32"),
        ("bfloat16", NATIVE, ("q4_1",), "bfloat16"), ("bfloat16", NATIVE, ("float32",), "bfloat16"),
    ],
)  # fmt: skip
def test_activations(wanted: str, kernels: Kernels, kinds: tuple[str, ...], activations: str) -> None:
    assert choose_activations(wanted, kernels, kinds) == activations  # type: ignore[arg-type]


def test_products_in_bfloat16_have_keys_of_it_and_longer_steps() -> None:
    assert choose_kv_dtype("auto", NATIVE, CPU, ("q4_1",), "bfloat16") == torch.bfloat16
    assert choose_kv_dtype("float16", NATIVE, CPU, ("q4_1",), "bfloat16") == torch.float16
    assert choose_kv_dtype("auto", NATIVE, CPU, ("q4_1",), "int8") == torch.float16
    assert [step_tokens(CPU, wanted) for wanted in ("auto", "float32", "int8", "bfloat16")] == [
        64,
        64,
        64,
        128,
    ]
    assert step_tokens(GPU, "auto") == 2048


@pytest.mark.parametrize(
    ("flag", "wanted", "kernels", "told"),
    [
        ("weights", "file", REFERENCE, "--weights file: --kernels reference computes in float32 only"),
        ("weights", "bfloat16", INTERPRETED, "--weights bfloat16 needs --device cuda"),
        (
            "activations",
            "int8",
            REFERENCE,
            "--activations int8: --kernels reference computes in float32 only",
        ),
        (
            "activations",
            "bfloat16",
            REFERENCE,
            "--activations bfloat16: --kernels reference computes in float32 only",
        ),
        ("activations", "bfloat16", COMPILED, "--activations bfloat16 needs --kernels native, triton has no"),
        ("activations", "int8", INTERPRETED, "--activations int8 needs --kernels native, triton has no such"),
        ("activations", "int8", COMPILED, "--activations int8 needs --kernels native, triton has no such"),
        (
            "activations",
            "int8",
            NATIVE,
            "--activations int8 needs quantised weights, they are float16 and float",
        ),
        ("kv", "float8_e4m3fn", NATIVE, "--kv-dtype float8_e4m3fn needs --kernels triton; native has int8"),
        ("kv", "float16", REFERENCE, "--kv-dtype float16: --kernels reference computes in float32 only"),
        ("kv", "int8", INTERPRETED, "--kv-dtype int8 needs --kernels native; triton has float8_e4m3fn"),
        ("kv", "bfloat16", INTERPRETED, "--kv-dtype bfloat16 needs --device cuda"),
    ],
)
def test_what_cannot_be_had_names_its_flag(flag: str, wanted: str, kernels: Kernels, told: str) -> None:
    def choose() -> object:
        if flag == "weights":
            return choose_weights(wanted, kernels, CPU)  # type: ignore[arg-type]
        if flag == "activations":
            return choose_activations(wanted, kernels, ("float32", "float16"))  # type: ignore[arg-type]
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


def test_native_says_what_it_keeps_and_multiplies(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "mixed.gguf", formats={"output.weight": "F16", "token_embd.weight": "Q5_1"}
    )
    file = read_gguf(path, weights="file", multiplier="panels")
    said = fingerprint(NATIVE, file, torch.int8, CPU, "int8")
    assert said.startswith("cpu/fma/native-1/")
    assert said.endswith(f"/weights-float16+float32+q5_1/activations-int8/kv-int8/{file.fingerprint}")
    assert said != fingerprint(NATIVE, file, torch.int8, CPU) != fingerprint(NATIVE, file, torch.float16, CPU)
