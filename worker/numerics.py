"""In which numbers a worker keeps weights, keys and values, and the fingerprint that says so.

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
from worker.model.weights.store import product_dtype

WantedWeights = Literal["auto", "file", "float32", "float16", "bfloat16"]
WantedKv = Literal["auto", "float32", "float16", "bfloat16", "float8_e4m3fn"]
_INTERPRETED = "Triton's interpreter has no such numbers"


def choose_weights(wanted: WantedWeights, kernels: Kernels, device: torch.device) -> WeightFormat:
    """What matrices are kept as: on a CUDA device as the file has them, else float32, unless told otherwise.

    Args:
        wanted: What the worker was started with.
        kernels: What multiplies them.
        device: Where they are.

    Raises:
        SettingRefused: These kernels multiply nothing of that kind on this device.
    """
    if wanted == "auto":
        return "float32" if device.type == "cpu" else "file"
    if kernels.name != "triton" and wanted != "float32":
        raise SettingRefused(f"--weights {wanted} needs --kernels triton, {kernels.name} takes float32 only")
    if device.type == "cpu" and wanted == "bfloat16":
        raise SettingRefused(f"--weights bfloat16 needs --device cuda: {_INTERPRETED}")
    return wanted


def choose_kv_dtype(
    wanted: WantedKv, kernels: Kernels, device: torch.device, matrix_kinds: Iterable[str]
) -> torch.dtype:
    """What keys and values are kept as: on a CUDA device 16 bits, else float32, unless told otherwise.

    Args:
        wanted: What the worker was started with.
        kernels: What attends them.
        device: Where they are.
        matrix_kinds: What the model's matrices are kept as: beside float16 and no bfloat16, float16.

    Raises:
        SettingRefused: These kernels attend nothing of that kind on this device.
    """
    if wanted == "auto":
        if device.type == "cpu":
            return torch.float32
        kinds = set(matrix_kinds)
        return torch.float16 if "float16" in kinds and "bfloat16" not in kinds else torch.bfloat16
    if kernels.name != "triton" and wanted != "float32":
        raise SettingRefused(f"--kv-dtype {wanted} needs --kernels triton, {kernels.name} takes float32 only")
    if device.type == "cpu" and wanted == "bfloat16":
        raise SettingRefused(f"--kv-dtype bfloat16 needs --device cuda: {_INTERPRETED}")
    return KV_DTYPES[wanted]


def fingerprint(kernels: Kernels, file: GgufFile, kv_dtype: torch.dtype, device: torch.device) -> str:
    """What workers have to share to agree bit for bit (idea 3 of the architecture).

    Args:
        kernels: What computes.
        file: The model, as it is kept.
        kv_dtype: Of the pool.
        device: Where.
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
    return "/".join([*parts, "activations-float32", f"kv-{name_of(kv_dtype)}", file.fingerprint])


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` of `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
