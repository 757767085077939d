"""Triton implementations. Importing this package does not import triton; its modules do."""

import os
import sys

import torch


def prepare_triton() -> torch.device:
    """Makes Triton's kernels usable in this process: under its interpreter where there is no CUDA device.

    Triton reads TRITON_INTERPRET while it is imported, so the process that wants its kernels calls this
    first, before anything may have imported triton. This is the only place that writes the environment.

    Returns:
        Where model and KV pool must be for these kernels.

    Raises:
        RuntimeError: There is no CUDA device, and triton was imported without its interpreter.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before prepare_triton, and there is no CUDA device")
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")
