"""Every format of weights with all activations and all kinds of keys and values: the gate, rows alone.

Pairs of modes are covered, not all three at once.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny_model import write_tiny_gguf
from tests.worker.numerics import bits
from worker.batch import Batch
from worker.kv.storage import KV_DTYPES, KvStorage
from worker.model.llama import LlamaModel
from worker.model.weights.file_matrix import PACKED_KINDS
from worker.model.weights.gguf import read_gguf, resolve_model_spec
from worker.plan.gate import check_plan_parity, ragged_steps
from worker.runner import Runner

ACTIVATIONS = ("float32", "int8", "bfloat16")
KV = ("float32", "float16", "bfloat16", "int8")
FORMATS = (*PACKED_KINDS, "mixed")
MIXED = {
    "token_embd.weight": "Q6_K",
    "output.weight": "F16",
    "blk.0.attn_q.weight": "Q4_K",
    "blk.0.attn_k.weight": "Q4_K",
    "blk.0.attn_v.weight": "Q6_K",
    "blk.0.attn_output.weight": "Q8_0",
    "blk.0.ffn_gate.weight": "Q5_0",
    "blk.0.ffn_up.weight": "Q5_K",
    "blk.0.ffn_down.weight": "BF16",
    "blk.1.attn_q.weight": "BF16",
    "blk.1.ffn_down.weight": "Q4_0",
}
"""Stacks of several formats, one that has to be widened, and products of all kinds."""
# Each format with all activations, each activation with all kinds of keys and values.
PAIRS = [
    (weights, activations, KV[(place + 2 * shift) % len(KV)])
    for place, weights in enumerate(FORMATS)
    for shift, activations in enumerate(ACTIVATIONS)
]


def test_all_pairs_are_there() -> None:
    assert {pair[:2] for pair in PAIRS} == {(a, b) for a in FORMATS for b in ACTIVATIONS}
    assert {pair[1:] for pair in PAIRS} == {(a, b) for a in ACTIVATIONS for b in KV}


def model_of(weights: str, folder: Path) -> LlamaModel:
    path = write_tiny_gguf(
        folder / "tiny.gguf", seed=7, hidden_size=256, num_heads=16, num_kv_heads=4, intermediate_size=256,
        formats=MIXED if weights == "mixed" else weights.upper(),
    )  # fmt: skip
    return LlamaModel.from_gguf(read_gguf(path, weights="file", multiplier="panels"))


def runner_of(
    model: LlamaModel, activations: str, kv_dtype: str, *, num_threads: int = 1, num_blocks: int = 48
) -> Runner:
    config = model.config
    kv = KvStorage(
        num_blocks=num_blocks, num_layers=config.num_layers, block_size=16,
        num_kv_heads=config.num_kv_heads, head_size=config.head_size, dtype=KV_DTYPES[kv_dtype],
    )  # fmt: skip
    kv.data.view(torch.uint8).fill_(0xFF)  # NaN in every float
    return Runner(
        model, kv, kernels="native", max_step_tokens=160, max_step_rows=8,
        num_threads=num_threads, activations=activations,
    )  # fmt: skip


def steps_for(model: LlamaModel, *, num_steps: int = 14, num_sessions: int = 4) -> list[Batch]:
    return ragged_steps(
        num_steps=num_steps,
        num_sessions=num_sessions,
        vocab_size=model.config.vocab_size,
        block_size=16,
        num_blocks=48,
        seed=3,
    )


def logits_by_session(runner: Runner, steps: Sequence[Batch]) -> dict[str, list[Tensor]]:
    """Logits of every row that wants them, in the order of steps."""
    found: dict[str, list[Tensor]] = {}
    for batch in steps:
        wanting = [row.session_id for row in batch.rows if row.wants_logits]
        for session_id, logits in zip(wanting, runner.run(batch).logits, strict=True):
            found.setdefault(session_id, []).append(logits)
    return found


def assert_rows_stand_alone(
    model: LlamaModel, activations: str, kv_dtype: str, steps: Sequence[Batch]
) -> None:
    together = logits_by_session(runner_of(model, activations, kv_dtype, num_threads=2), steps)
    assert len(together) >= 4
    for session_id, expected in together.items():
        own = [Batch((row,)) for batch in steps for row in batch.rows if row.session_id == session_id]
        alone = logits_by_session(runner_of(model, activations, kv_dtype), own)[session_id]
        assert torch.equal(bits(torch.stack(alone)), bits(torch.stack(expected))), session_id
        assert torch.stack(expected).isfinite().all()


@pytest.mark.parametrize(("weights", "activations", "kv_dtype"), PAIRS)
def test_plan_on_and_off_are_equal_and_rows_stand_alone(
    weights: str, activations: str, kv_dtype: str, tmp_path: Path
) -> None:
    model = model_of(weights, tmp_path)
    steps = steps_for(model)
    arms = [runner_of(model, activations, kv_dtype, num_threads=number) for number in (2, 3)]
    assert check_plan_parity(*arms, steps).num_logit_rows > 20
    assert_rows_stand_alone(model, activations, kv_dtype, steps)
    assert bool(model.store.widened) == (weights == "mixed")


@pytest.mark.parametrize("activations", ["int8", "bfloat16"])
@pytest.mark.parametrize("weights", ["q4_1", "q6_k", "mixed"])
def test_rounded_products_are_others_than_float32_and_near(
    weights: str, activations: str, tmp_path: Path
) -> None:
    model = model_of(weights, tmp_path)
    steps = steps_for(model)
    exact, rounded = (
        torch.cat(
            [
                torch.stack(each)
                for each in logits_by_session(runner_of(model, mode, "float32"), steps).values()
            ]
        )
        for mode in ("float32", activations)
    )
    assert not torch.equal(exact, rounded)
    # Of two layers of eight products each 1% of a logit's spread was seen.
    assert (exact - rounded).square().mean().sqrt() < 0.05 * exact.std()


@pytest.mark.parametrize("weights", PACKED_KINDS)
def test_float32_activations_give_the_bits_of_dequantised_weights(weights: str, tmp_path: Path) -> None:
    model = model_of(weights, tmp_path)
    plain = LlamaModel.from_gguf(read_gguf(tmp_path / "tiny.gguf"))
    steps = steps_for(model, num_sessions=2)[:8]
    of_file, of_floats = (
        logits_by_session(runner_of(each, "float32", "float32"), steps) for each in (model, plain)
    )
    for session_id, logits in of_floats.items():
        assert torch.equal(bits(torch.stack(of_file[session_id])), bits(torch.stack(logits)))


@pytest.mark.model
@pytest.mark.parametrize(("activations", "kv_dtype"), [("int8", "float16"), ("bfloat16", "bfloat16")])
def test_rows_of_a_real_model_stand_alone(activations: str, kv_dtype: str) -> None:
    path = resolve_model_spec("smollm2-135m")
    model = LlamaModel.from_gguf(read_gguf(path, weights="file", multiplier="panels"))
    assert_rows_stand_alone(model, activations, kv_dtype, steps_for(model))
