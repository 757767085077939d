"""Where a worker computes and with which kernels. Knows a model's sizes, no weights and no steps."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from worker.kernels.triton import CPU, kernel_digest, prepare_triton
from worker.kernels.triton.targets import target_of
from worker.model.config import LlamaConfig
from worker.plan.executor import KernelsUnsuitable

Wanted = Literal["auto", "native", "reference", "triton"]


class KernelsMissing(RuntimeError):
    """The kernels that were asked for are not installed."""


class SettingRefused(ValueError):
    """A flag's value can't be had here; the message names the flag."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes the operators of one worker.

    Attributes:
        name: For the runner: "native", "reference" or "triton".
        kernel_set: The instructions that native kernels use on this machine, e.g. "avx2", or the device that
            triton's run on, e.g. "sm_90", "interpreter"; empty for others.
        numerics: What has to be equal, of device, machine and kernels, for two workers to get the same bits.
        fallback: Why "auto" did not take native; empty where it did, or where no choice was left.
    """

    name: Literal["native", "reference", "triton"]
    kernel_set: str
    numerics: tuple[str, ...]
    fallback: str = ""


def choose_device(wanted: Literal["auto", "cpu", "cuda"], kernels: Wanted) -> torch.device:
    """Choose the CUDA device (of CUDA or ROCm) where there is one and the kernels can use it, else the CPU.

    Args:
        wanted: What the worker was started with.
        kernels: As well.

    Returns:
        The CPU, or a device with its number.

    Raises:
        SettingRefused: A CUDA device was asked for, and there is none, or the kernels can't run on it.
    """
    if wanted == "cpu" or (wanted == "auto" and kernels in ("native", "reference")):
        return CPU
    if missing := _what_cuda_lacks(kernels):
        if wanted == "cuda":
            raise SettingRefused(f"--device cuda: {missing}")
        return CPU
    return torch.device("cuda", torch.cuda.current_device())


def passed_over(wanted: Literal["auto", "cpu", "cuda"], kernels: Wanted) -> str:
    """Why "auto" left a CUDA device aside that somebody may count on; empty where there is nothing to tell.

    Told where a device is there, and where triton was asked for, which its interpreter runs a thousand times
    slower on the CPU.

    Args:
        wanted: As for `choose_device`.
        kernels: As well.
    """
    if wanted != "auto" or kernels in ("native", "reference"):
        return ""
    missing = _what_cuda_lacks(kernels)
    return missing if kernels == "triton" or torch.cuda.is_available() else ""


def choose_kernels(
    wanted: Wanted, config: LlamaConfig, block_size: int, device: torch.device = CPU
) -> Kernels:
    """Choose triton on a CUDA device; on the CPU native where it can be had, else reference.

    Where triton is chosen, it is prepared for the device (`prepare_triton`) and imported.

    Args:
        wanted: What the worker was started with.
        config: Sizes of its model.
        block_size: Tokens per KV block.
        device: Where model and pool will be.

    Raises:
        KernelsMissing: Native or triton were asked for, and are not installed.
        KernelsUnsuitable: Native was asked for, and the model has a size that is none of theirs.
        SettingRefused: The kernels that were asked for can't run on the device.
    """
    if wanted == "triton" or (wanted == "auto" and device.type != "cpu"):
        return _triton(device)
    if device.type != "cpu":
        raise SettingRefused(f"--kernels {wanted} runs on --device cpu only, not on {device}")
    if wanted == "reference":
        return _reference()
    if missing := _what_native_lacks():
        if wanted == "native":
            raise KernelsMissing(missing)
        return _reference(missing)
    if unsuitable := _what_native_dislikes(config, block_size):
        if wanted == "native":
            raise KernelsUnsuitable(unsuitable)
        return _reference(unsuitable)
    return _native()


def _what_cuda_lacks(kernels: Wanted) -> str:
    if kernels in ("native", "reference"):
        return f"--kernels {kernels} runs on the CPU only"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no such device"
    try:
        target_of(torch.device("cuda", torch.cuda.current_device()))
    except ValueError as error:
        return str(error)
    return _what_triton_lacks() if kernels == "auto" else ""


def _what_triton_lacks() -> str:
    # Not imported: it has to be prepared first.
    if find_spec("triton") is None:
        return "triton kernels need the package triton (in the repository: pip install '.[triton]')"
    return ""


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


def _reference(fallback: str = "") -> Kernels:
    """Kernels with torch's matrix products: the order of additions is what it makes of this CPU."""
    return Kernels("reference", "", ("cpu", _cpu(), "reference"), fallback)


def _triton(device: torch.device) -> Kernels:
    """Triton's kernels: bits depend on the device's instructions, the compiler and the kernels themselves."""
    if missing := _what_triton_lacks():
        raise KernelsMissing(missing)
    prepare_triton(device)
    import triton  # noqa: PLC0415  prepared first

    versions = f"triton-{triton.__version__}", f"kernels-{kernel_digest()}"
    if device.type == "cpu":
        import numpy as np  # noqa: PLC0415  what the interpreter computes with

        return Kernels("triton", "interpreter", ("cpu", _cpu(), f"numpy-{np.__version__}", *versions))
    name = _device_name(device)
    return Kernels("triton", name, (name, *versions))


def _cpu() -> str:
    return torch.backends.cpu.get_cpu_capability().lower()


def _device_name(device: torch.device) -> str:
    """The device's instructions: `sm_90`, `gfx942`."""
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
