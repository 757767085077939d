"""Section: which machine this is, and what it can do at best, which is what floors are made of."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from bench.gpu_timing import copy_bandwidth, matmul_rate
from bench.gpu_values import Case, Line, Setting

_PACKAGES = ("torch", "triton", "transformers", "numpy")


def cases(setting: Setting) -> list[Case]:
    """Versions, the card, and its two rates."""
    device = torch.device(setting.device)
    return [
        Case("versions", _versions),
        Case("card", lambda: _card(device)),
        Case("copy bandwidth", lambda: [Line("copy bandwidth", copy_bandwidth(device) / 1e9, "GB/s")]),
        Case(
            "rate of a bfloat16 product",
            lambda: [Line("rate of a bfloat16 product", matmul_rate(device) / 1e12, "TFLOP/s")],
        ),
    ]


def _versions() -> Iterator[Line]:
    for package in _PACKAGES:
        try:
            yield Line(package, note=version(package))
        except PackageNotFoundError:
            yield Line(package, note="not installed")
    yield Line("python", note=platform.python_version())
    yield Line("CUDA of torch", note=str(torch.version.cuda or torch.version.hip or "none"))


def _card(device: torch.device) -> Iterator[Line]:
    if device.type == "cpu":
        yield Line("card", note="none: Triton's interpreter")
        return
    found = torch.cuda.get_device_properties(device)
    yield Line("card", note=f"{found.name}, compute capability {found.major}.{found.minor}")
    yield Line("memory", found.total_memory / 1e9, "GB")
    yield Line("multiprocessors", float(found.multi_processor_count))
