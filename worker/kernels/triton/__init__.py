"""Triton implementations. Importing this package does not import triton; its modules do."""

import os
import sys

import torch

CPU = torch.device("cpu")
KERNEL_VERSION = 1
"""Part of the numerics fingerprint: raised by every change after which a kernel may give other bits."""


def prepare_triton(device: torch.device = CPU) -> torch.device:
    """Makes Triton's kernels usable in this process: compiled for a GPU, or under its interpreter on a CPU.

    Triton reads TRITON_INTERPRET while it is imported, so the process that wants its kernels calls this
    first, before anything may have imported triton. This is the only place that writes the environment.

    Args:
        device: Where model and KV pool will be.

    Returns:
        `device`.

    Raises:
        RuntimeError: Triton was imported for the other kind of device already, or TRITON_INTERPRET is set
            and the device is a GPU.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cpu":
        if is_interpreted:
            raise RuntimeError(f"TRITON_INTERPRET is set: it makes kernels run on the CPU, not on {device}")
        return device
    if "triton" in sys.modules and not is_interpreted:
        raise RuntimeError("triton was imported before prepare_triton, without its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    return device
