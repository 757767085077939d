"""In which numbers a worker keeps weights, keys and values and multiplies, and the fingerprint that says so.

Knows flags, devices and a model file's formats; no kernels and no memory.
"""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Literal

import torch

from worker.kernel_choice import Kernels, SettingRefused
from worker.kv.storage import KV_DTYPES
from worker.model.weights.convert import WeightFormat
from worker.model.weights.gguf import GgufFile
from worker.model.weights.store import Activations, product_dtype

WantedWeights = Literal["auto", "file", "float32", "float16", "bfloat16"]
WantedActivations = Literal["auto", "float32", "int8", "bfloat16"]
WantedKv = Literal["auto", "float32", "float16", "bfloat16", "int8", "float8_e4m3fn"]
_INTERPRETED = "Triton's interpreter has no such numbers"
_FLOAT32_ONLY = "--kernels reference computes in float32 only"


def choose_weights(wanted: WantedWeights, kernels: Kernels, device: torch.device) -> WeightFormat:
    """What matrices are kept as: as the file has them, but float32 with reference kernels and an interpreter.

    Args:
        wanted: What the worker was started with.
        kernels: What multiplies them.
        device: Where they are.

    Raises:
        SettingRefused: These kernels multiply nothing of that kind on this device.
    """
    if wanted == "auto":
        return "file" if kernels.name == "native" or device.type != "cpu" else "float32"
    if kernels.name == "reference" and wanted != "float32":
        raise SettingRefused(f"--weights {wanted}: {_FLOAT32_ONLY}")
    if kernels.name == "triton" and device.type == "cpu" and wanted == "bfloat16":
        raise SettingRefused(f"--weights bfloat16 needs --device cuda: {_INTERPRETED}")
    return wanted


def check_activations(wanted: WantedActivations, kernels: Kernels) -> None:
    """Refuse activations that kernels can't multiply, whatever the weights.

    Args:
        wanted: What the worker was started with.
        kernels: What multiplies them.

    Raises:
        SettingRefused: As said.
    """
    if wanted in ("auto", "float32") or kernels.name == "native":
        return
    if kernels.name == "reference":
        raise SettingRefused(f"--activations {wanted}: {_FLOAT32_ONLY}")
    raise SettingRefused(
        f"--activations {wanted} needs --kernels native, {kernels.name} has no such products"
    )


def choose_activations(
    wanted: WantedActivations, kernels: Kernels, matrix_kinds: Iterable[str]
) -> Activations:
    """What products are made of: eight bits with native kernels and quantised weights, unless told otherwise.

    That eight bits are close enough is measured (tests/worker/test_activations.py): a mean divergence from
    the exact logits of at most 0.01 nats, and the same first token at 99% of positions that have a clear one.

    Args:
        wanted: What the worker was started with.
        kernels: What multiplies them.
        matrix_kinds: What the model's matrices are kept as.

    Raises:
        SettingRefused: These kernels have none of what was asked for, or eight bits were and no weight is
            quantised.
    """
    check_activations(wanted, kernels)
    kinds = sorted(matrix_kinds)
    is_quantised = any(kind.startswith("q") for kind in kinds)
    if wanted == "int8" and not is_quantised:
        raise SettingRefused(
            f"--activations int8 needs quantised weights, they are {' and '.join(kinds)} here"
        )
    if wanted != "auto":
        return wanted
    return "int8" if kernels.name == "native" and is_quantised else "float32"


def choose_kv_dtype(
    wanted: WantedKv,
    kernels: Kernels,
    device: torch.device,
    matrix_kinds: Iterable[str],
    activations: WantedActivations = "auto",
) -> torch.dtype:
    """What keys and values are kept as: 16 bits on a CUDA device and with native kernels, else float32.

    Args:
        wanted: What the worker was started with.
        kernels: What attends them.
        device: Where they are.
        matrix_kinds: What the model's matrices are kept as: on a CUDA device keys and values are float16
            beside float16 and no bfloat16.
        activations: What products are made of: with bfloat16 nothing is lost that attention would keep.

    Raises:
        SettingRefused: These kernels attend nothing of that kind on this device.
    """
    if wanted == "auto":
        if device.type == "cpu":
            if kernels.name != "native":
                return torch.float32
            return torch.bfloat16 if activations == "bfloat16" else torch.float16
        kinds = set(matrix_kinds)
        return torch.float16 if "float16" in kinds and "bfloat16" not in kinds else torch.bfloat16
    if kernels.name == "reference" and wanted != "float32":
        raise SettingRefused(f"--kv-dtype {wanted}: {_FLOAT32_ONLY}")
    if kernels.name == "native" and wanted == "float8_e4m3fn":
        raise SettingRefused(f"--kv-dtype {wanted} needs --kernels triton; native has int8 of that size")
    if kernels.name == "triton" and wanted == "int8":
        raise SettingRefused("--kv-dtype int8 needs --kernels native; triton has float8_e4m3fn of that size")
    if kernels.name == "triton" and device.type == "cpu" and wanted == "bfloat16":
        raise SettingRefused(f"--kv-dtype bfloat16 needs --device cuda: {_INTERPRETED}")
    return KV_DTYPES[wanted]


def step_tokens(device: torch.device, activations: WantedActivations) -> int:
    """Tokens of a step at most, where nobody says.

    On a CPU a step of more tokens makes running turns wait; a GPU's matrix units idle below some hundreds.
    Products in bfloat16 unpack weights once a step, which only many tokens pay for.

    Args:
        device: Where steps run.
        activations: What products are made of.
    """
    if device.type != "cpu":
        return 2048
    return 128 if activations == "bfloat16" else 64


def fingerprint(
    kernels: Kernels,
    file: GgufFile,
    kv_dtype: torch.dtype,
    device: torch.device,
    activations: Activations = "float32",
) -> str:
    """What workers have to share to agree bit for bit (idea 3 of the architecture).

    Args:
        kernels: What computes.
        file: The model, as it is kept.
        kv_dtype: Of the pool.
        device: Where.
        activations: What products are made of.
    """
    kinds = file.matrix_kinds
    parts = [*kernels.numerics, version("pagecast")]
    if kernels.name == "reference":
        parts.append(f"torch-{torch.__version__}")
    parts.append(f"weights-{'+'.join(kinds)}")
    if kernels.name == "triton":
        # What both sides of a product are rounded to, and the longest log: spans of attention follow it.
        products = sorted(
            {kind if hasattr(torch, kind) else name_of(product_dtype(device)) for kind in kinds}
        )
        parts += [f"products-{'+'.join(products)}", f"context-{file.config.max_context_tokens}"]
    return "/".join([*parts, f"activations-{activations}", f"kv-{name_of(kv_dtype)}", file.fingerprint])


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` of `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
