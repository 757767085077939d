"""Pools and comparisons that tests of the numerics share."""

import torch
from torch import Tensor

from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel


def make_kv(model: LlamaModel, *, num_blocks: int = 64, fill: float = 0.0) -> KvStorage:
    config = model.config
    kv = KvStorage(
        num_blocks=num_blocks,
        num_layers=config.num_layers,
        block_size=16,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
    )
    kv.data.fill_(fill)
    return kv


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits: NaN equals itself, -0 differs from 0."""
    return tensor.contiguous().view(torch.int32)
