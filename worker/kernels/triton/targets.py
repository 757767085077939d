"""The devices that kernels are made for, and which of them this process runs on."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of device.

    Attributes:
        name: As `configs` and the kernel report call it: `sm_90`, `gfx942`, or `interpreter`.
        backend: `cuda`, `hip`, or `interpreter`: Triton's, on a CPU.
        arch: What the compiler is told: a compute capability such as 90, or `gfx942`.
        warp_size: Threads of a warp.
        shared_bytes: Shared memory that one program may take.
        num_sms: Multiprocessors (compute units); how many programs run side by side at least.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    num_sms: int


INTERPRETER = Target("interpreter", "interpreter", 0, 32, 1 << 30, 1)
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 * 1024, 108),
        Target("sm_90", "cuda", 90, 32, 227 * 1024, 132),
        Target("sm_100", "cuda", 100, 32, 227 * 1024, 148),
        Target("gfx942", "hip", "gfx942", 64, 64 * 1024, 304),
    )
}
"""What kernels are compiled and checked for. Another device takes the configs of the one that is like it."""


def target_of(device: torch.device) -> Target:
    """The target whose configs a device takes: its own, else the nearest older one.

    Args:
        device: Where the tensors are; a CPU means Triton's interpreter.

    Raises:
        ValueError: The device is older than every target, has less shared memory than the kernels of the
            nearest one take, or is of no known kind.
    """
    if device.type == "cpu":
        return INTERPRETER
    if device.type != "cuda":
        raise ValueError(f"device {device} is neither a CPU nor one of CUDA or ROCm")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch = str(properties.gcnArchName).partition(":")[0]
        if arch not in TARGETS:
            raise ValueError(f"there are no kernels for {arch}, only for gfx942")
        return TARGETS[arch]
    major, minor = torch.cuda.get_device_capability(device)
    older = [
        target
        for target in TARGETS.values()
        if isinstance(target.arch, int) and target.arch <= 10 * major + minor
    ]
    if not older:
        raise ValueError(f"compute capability {major}.{minor} is below 8.0")
    nearest = max(older, key=lambda target: int(target.arch))
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not in its stub
    if shared_bytes < nearest.shared_bytes:
        raise ValueError(
            f"compute capability {major}.{minor} has {shared_bytes} bytes of shared memory for a program, "
            f"kernels of {nearest.name} take up to {nearest.shared_bytes}"
        )
    return nearest
