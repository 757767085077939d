"""The rule that a worker's defaults follow: how far from exact logits rounded numbers lead.

SmolLM2's golden prompts and replies are fed as they are, and logits of every position are compared with those
of float32 activations over float32 keys and values. `pytest -rP` shows the figures.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker.numerics import bits
from worker.batch import Batch, DecodePlan, Row
from worker.kernel_choice import Kernels
from worker.kv.storage import KV_DTYPES, KvStorage
from worker.model.llama import LlamaModel
from worker.model.weights.gguf import GgufFile, read_gguf, resolve_model_spec
from worker.numerics import choose_activations, choose_kv_dtype, choose_weights, name_of
from worker.runner import Runner

pytestmark = pytest.mark.model
CPU = torch.device("cpu")
NATIVE = Kernels("native", "avx2", ("cpu", "fma", "native-1"))
LOGS: list[list[int]] = [
    case["prompt_ids"] + case["token_ids"][:-1]
    for case in json.loads(
        (Path(__file__).parents[1] / "golden" / "smollm2-greedy.json").read_text(encoding="utf-8")
    )["cases"]
]
MOST_DIVERGENCE = 0.01
LEAST_MARGIN, LEAST_AGREEMENT = 0.1, 0.99
Mode = tuple[str, str]
EXACT: Mode = ("float32", "float32")
MODES: list[Mode] = [
    ("int8", "float16"), ("int8", "int8"), ("float32", "float16"), ("bfloat16", "bfloat16"),
]  # fmt: skip
"""Activations, and keys and values."""


@dataclass(frozen=True)
class Closeness:
    """How near a mode is to exact logits.

    Attributes:
        divergence: Mean over positions of the Kullback-Leibler divergence of its distribution from the exact
            one, in nats.
        num_agreeing: Positions where both have one most likely token, of those with a clear one.
        num_clear: Positions whose two largest exact logits lie `LEAST_MARGIN` apart or more.
    """

    divergence: float
    num_agreeing: int
    num_clear: int

    @property
    def is_near(self) -> bool:
        """Whether this may be a default."""
        agreement = self.num_agreeing / self.num_clear
        return self.divergence <= MOST_DIVERGENCE and agreement >= LEAST_AGREEMENT


@pytest.fixture(scope="module")
def file() -> GgufFile:
    return read_gguf(resolve_model_spec("smollm2-135m"), weights="file", multiplier="panels")


def logits_of(model: LlamaModel, mode: Mode) -> Iterator[Tensor]:
    """[positions, vocab] for each log: every token is a row; those that share blocks see what is stored."""
    activations, kv_dtype = mode
    config, most = model.config, max(map(len, LOGS))
    blocks = tuple(range(-(-most // 16)))
    kv = KvStorage(
        num_blocks=len(blocks), num_layers=config.num_layers, block_size=16,
        num_kv_heads=config.num_kv_heads, head_size=config.head_size, dtype=KV_DTYPES[kv_dtype],
    )  # fmt: skip
    runner = Runner(
        model, kv, kernels="native", max_step_tokens=most, max_step_rows=most,
        num_threads=2, activations=activations,
    )  # fmt: skip
    for log in LOGS:
        rows = [
            Row(f"at {place}", (token_id,), place, blocks, wants_logits=True, plan=DecodePlan.PLAN_ONCE)
            for place, token_id in enumerate(log)
        ]
        yield runner.run(Batch(tuple(rows))).logits


@pytest.fixture(scope="module")
def model(file: GgufFile) -> LlamaModel:
    return LlamaModel.from_gguf(file)


@pytest.fixture(scope="module")
def exact(model: LlamaModel) -> list[Tensor]:
    return list(logits_of(model, EXACT))


@pytest.fixture(scope="module")
def measured(model: LlamaModel, exact: list[Tensor]) -> dict[Mode, Closeness]:
    found = {}
    for mode in MODES:
        divergences, num_agreeing, num_clear = [], 0, 0
        for wanted, logits in zip(exact, logits_of(model, mode), strict=True):
            log_p, log_q = wanted.log_softmax(-1), logits.log_softmax(-1)
            divergences.append((log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64))
            top = wanted.topk(2)
            is_clear = top.values[:, 0] - top.values[:, 1] >= LEAST_MARGIN
            agrees = top.indices[:, 0] == logits.argmax(-1)
            num_clear += int(is_clear.sum())
            num_agreeing += int((agrees & is_clear).sum())
        found[mode] = Closeness(float(torch.cat(divergences).mean()), num_agreeing, num_clear)
    return found


def test_the_defaults_are_near(measured: dict[Mode, Closeness], file: GgufFile) -> None:
    for (activations, kv_dtype), near in measured.items():
        sys.stdout.write(
            f"activations {activations}, keys and values {kv_dtype}: {near.divergence:.5f} nats, "
            f"the same first token at {near.num_agreeing} of {near.num_clear} positions\n"
        )
    weights = choose_weights("auto", NATIVE, CPU)
    kv_dtype = name_of(choose_kv_dtype("auto", NATIVE, CPU, file.matrix_kinds))
    assert (weights, kv_dtype) == ("file", "float16")
    default = choose_activations("auto", NATIVE, file.matrix_kinds)
    assert measured[default, kv_dtype].is_near, measured
    assert default == ("int8" if measured["int8", kv_dtype].is_near else "float32")


def test_bfloat16_is_near(measured: dict[Mode, Closeness]) -> None:
    assert measured["bfloat16", "bfloat16"].is_near
    assert measured["bfloat16", "bfloat16"].divergence > measured["float32", "float16"].divergence


def test_the_measure_sees_a_difference(measured: dict[Mode, Closeness]) -> None:
    narrow, narrower = measured["float32", "float16"], measured["int8", "int8"]
    assert 0 < narrow.divergence < measured["int8", "float16"].divergence <= narrower.divergence
    assert narrow.num_clear == narrower.num_clear > 900
    assert not Closeness(0.011, 100, 100).is_near
    assert not Closeness(0.0, 989, 1000).is_near
    assert Closeness(0.01, 99, 100).is_near


def test_weights_of_the_file_give_the_bits_of_their_float32_twins(exact: list[Tensor]) -> None:
    """With float32 activations over float32 keys and values."""
    plain = LlamaModel.from_gguf(read_gguf(resolve_model_spec("smollm2-135m")))
    for of_file, of_floats in zip(exact, logits_of(plain, EXACT), strict=True):
        assert torch.equal(bits(of_file), bits(of_floats))
