"""Rows, tiny models of several shapes, and inputs of a plain step, that tests of plans share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.tiny_model import write_tiny_gguf
from worker.batch import DecodePlan, Row
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.model.weights.gguf import read_gguf
from worker.plan.buffers import StepBuffers
from worker.plan.graph import StepInputs
from worker.plan.program import Capacity, Extent, live_length
from worker.plan.rows import StepLimits

BOTH_KERNELS = ["reference", "native"]


@dataclass(frozen=True)
class Shape:
    """Sizes that a tiny model may have; head size and block size suit native kernels."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    block_size: int


SHAPES = {
    "grouped": Shape(6, 2, 16, 64, 128, 16),
    "one-kv-head": Shape(3, 1, 32, 96, 80, 32),
    "odd-widths": Shape(2, 2, 16, 52, 72, 16),
}
"""`odd-widths`: hidden is no multiple of 16, so rows have a tail; gate and up can't be merged."""


def model_of(shape: Shape, folder: Path, *, seed: int = 7) -> LlamaModel:
    path = write_tiny_gguf(
        folder / "tiny.gguf",
        seed=seed,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
    )
    return LlamaModel.from_gguf(read_gguf(path))


def pool_of(
    model: LlamaModel, *, block_size: int = 16, num_blocks: int = 64, fill: float = float("nan")
) -> KvStorage:
    config = model.config
    kv = KvStorage(
        num_blocks=num_blocks,
        num_layers=config.num_layers,
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
    )
    kv.data.fill_(fill)
    return kv


def row_of(
    session: str,
    count: int = 1,
    position: int = 0,
    blocks: Sequence[int] = (3, 5),
    *,
    wants_logits: bool = True,
    plan: DecodePlan = DecodePlan.PLAN_ONCE,
) -> Row:
    token_ids = tuple((31 * (position + place) + sum(map(ord, session))) % 250 for place in range(count))
    return Row(session, token_ids, position, tuple(blocks), wants_logits, plan)


def buffers_of(capacity: Capacity, *, block_size: int = 16, device: str = "cpu") -> StepBuffers:
    """Buffers of a plan for any of the pools and models here."""
    limits = StepLimits(
        num_tokens=capacity.num_tokens,
        num_rows=capacity.num_rows,
        max_context_tokens=capacity.max_blocks * block_size,
        vocab_size=256,
        block_size=block_size,
        num_blocks=1024,
    )
    return StepBuffers(limits, device=torch.device(device))


def live_inputs(buffers: StepBuffers, rows: Sequence[Row]) -> tuple[StepInputs, tuple[int, ...]]:
    """Binds rows and cuts the inputs as a program reads them; and the places of their logits."""
    bound = buffers.bind(rows)
    live = {Extent.TOKENS: bound.num_tokens, Extent.ROWS: bound.num_rows, Extent.LOGITS: bound.num_logits}
    cut = (getattr(buffers.inputs, name)[: live_length(name, live)].clone() for name in StepInputs._fields)
    return StepInputs(*cut), bound.places


def eager_logits(model: LlamaModel, kv: KvStorage, rows: Sequence[Row]) -> Tensor:
    """Logits of the model's step as it is written, in the order of the rows that want them."""
    capacity = Capacity(sum(len(row.token_ids) for row in rows), len(rows), 64)
    inputs, places = live_inputs(buffers_of(capacity, block_size=kv.block_size), rows)
    logits = model.forward_paged_step(*inputs, kv=kv)
    return logits[list(places)]
