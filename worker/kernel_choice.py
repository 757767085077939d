"""Which kernels a worker runs, and what it tells of them. Knows a model's sizes, no weights and no steps."""

from dataclasses import dataclass
from typing import Literal

import torch

from worker.model.config import LlamaConfig
from worker.plan.executor import KernelsUnsuitable

Wanted = Literal["auto", "native", "reference", "triton"]


class KernelsMissing(RuntimeError):
    """The kernels that were asked for are not installed."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes the operators of one worker.

    Attributes:
        name: For the runner: "native", "reference" or "triton".
        kernel_set: The instructions that native kernels use on this machine, e.g. "avx2"; empty for others.
        numerics: What has to be equal, of device, machine and kernels, for two workers to get the same bits.
        fallback: Why "auto" did not take native; empty where it did, or where no choice was left.
    """

    name: Literal["native", "reference", "triton"]
    kernel_set: str
    numerics: tuple[str, ...]
    fallback: str = ""


def choose_kernels(wanted: Wanted, config: LlamaConfig, block_size: int) -> Kernels:
    """Choose native where "auto" was asked for and native can be had, else reference.

    Args:
        wanted: What the worker was started with.
        config: Sizes of its model.
        block_size: Tokens per KV block.

    Raises:
        KernelsMissing: Native was asked for, and is not installed.
        KernelsUnsuitable: Native was asked for, and the model has a size that is none of theirs.
    """
    if wanted in ("reference", "triton"):
        return _of_torch(wanted)
    if missing := _what_native_lacks():
        if wanted == "native":
            raise KernelsMissing(missing)
        return _of_torch("reference", missing)
    if unsuitable := _what_native_dislikes(config, block_size):
        if wanted == "native":
            raise KernelsUnsuitable(unsuitable)
        return _of_torch("reference", unsuitable)
    return _native()


def _what_native_lacks() -> str:
    try:
        import pagecast_native  # noqa: F401, PLC0415  an optional distribution, loaded where it is wanted
    except ImportError as error:
        how = "in the repository: pip install ./worker/native"
        return f"native kernels need the package pagecast-native ({how}): {error}"
    return ""


def _what_native_dislikes(config: LlamaConfig, block_size: int) -> str:
    from worker.plan.native import native_unsuitable  # noqa: PLC0415  it loads pagecast_native

    unsuitable = native_unsuitable(config, block_size)
    return f"native kernels do not suit this model: {unsuitable}" if unsuitable else ""


def _native() -> Kernels:
    import pagecast_native  # noqa: PLC0415  see above

    kernel_set = pagecast_native.default_kernel_set()
    # Sets that round alike give the same bits: their lanes differ, the order of additions does not.
    rounding = "fma" if pagecast_native.is_fused(kernel_set) else "nofma"
    numerics = ("cpu", rounding, f"native-{pagecast_native.KERNEL_VERSION}")
    return Kernels("native", kernel_set, numerics)


def _of_torch(name: Literal["reference", "triton"], fallback: str = "") -> Kernels:
    """Kernels with torch's matrix products: the order of additions is what it makes of this CPU."""
    numerics = ("cpu", torch.backends.cpu.get_cpu_capability().lower(), name)
    return Kernels(name, "", numerics, fallback)
