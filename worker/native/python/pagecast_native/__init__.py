"""Pagecast's native step runner: kernels over packed weights, one arena, a team of threads.

Knows launches and memory; neither models nor sessions. Arrays come in as anything with `__dlpack__` (torch
tensors, NumPy arrays) and are used in place: what a program was given must keep its memory while it lives.
"""

from pagecast_native._core import (
    KERNEL_VERSION,
    LANES,
    MAX_HEAD_SIZE,
    MAX_THREADS,
    GgufPart,
    KvLayer,
    PackedMatrix,
    Program,
    Sampler,
    Team,
    View,
    default_kernel_set,
    gguf_kinds,
    is_fused,
    kernel_sets,
)

__all__ = [
    "KERNEL_VERSION",
    "LANES",
    "MAX_HEAD_SIZE",
    "MAX_THREADS",
    "GgufPart",
    "KvLayer",
    "PackedMatrix",
    "Program",
    "Sampler",
    "Team",
    "View",
    "default_kernel_set",
    "gguf_kinds",
    "is_fused",
    "kernel_sets",
]
