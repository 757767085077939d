"""Triton implementations. Importing this package does not import triton; its modules do."""

import hashlib
import os
import sys
from pathlib import Path

import torch

CPU = torch.device("cpu")


def kernel_digest() -> str:
    """Eight hex digits of all sources of this package: kernels, launchers and configs.

    Part of the numerics fingerprint. A change of any line may give other bits, and nothing else could tell
    that nobody forgot to say so.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


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
