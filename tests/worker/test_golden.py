"""SmolLM2 against another implementation's greedy runs, its own tokens fed (teacher-forced)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.numerics import bits
from worker.batch import Batch, DecodePlan, Row
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.model.weights.gguf import read_gguf, resolve_model_spec
from worker.plan.policy import PlanPolicy
from worker.runner import Runner, step_inputs

pytestmark = pytest.mark.model
CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "smollm2-greedy.json").read_text(encoding="utf-8")
)["cases"]
LEAST_MARGIN = 0.02
TOLERANCE = 0.02
BLOCKS = tuple(range(1, 11))


@pytest.fixture(scope="module")
def smollm2() -> LlamaModel:
    return LlamaModel.from_gguf(read_gguf(resolve_model_spec("smollm2-135m")))


def pool_for(model: LlamaModel) -> KvStorage:
    config = model.config
    return KvStorage(
        num_blocks=len(BLOCKS) + 1,
        num_layers=config.num_layers,
        block_size=16,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
    )


def forced_logits(model: LlamaModel, case: dict[str, Any]) -> torch.Tensor:
    """Logits [new tokens, vocab] before each given token, from one step over the whole log."""
    log = tuple(case["prompt_ids"] + case["token_ids"][:-1])
    first = len(case["prompt_ids"]) - 1
    row = Row("golden", log, 0, BLOCKS, wants_logits=True, plan=DecodePlan.PLAN_ONCE)
    inputs = step_inputs((row,), 16)._replace(logits_index=torch.arange(first, len(log), dtype=torch.int32))
    policy = PlanPolicy(kernels="reference", max_step_tokens=len(log), max_step_rows=1)
    return policy.forward_paged_step_persistent(inputs, row.plan, model, pool_for(model)).logits


@pytest.mark.parametrize("case", CASES, ids=[case["prompt"] for case in CASES])
def test_ids_and_top_logits_are_the_given_ones(smollm2, case):
    logits = forced_logits(smollm2, case)
    chosen = logits.argmax(-1).tolist()
    sure = [step for step, margin in enumerate(case["top1_minus_top2"]) if margin >= LEAST_MARGIN]
    assert sure
    assert {step: chosen[step] for step in sure} == {step: case["token_ids"][step] for step in sure}
    assert case["top5"]
    worst = max(
        (logits[top["step"], top["ids"]] - torch.tensor(top["logits"])).abs().max().item()
        for top in case["top5"]
    )
    assert worst <= TOLERANCE


def test_the_runner_decodes_the_bits_of_one_long_step(smollm2):
    case = min(CASES, key=lambda case: len(case["token_ids"]))
    expected = forced_logits(smollm2, case)
    runner = Runner(smollm2, pool_for(smollm2), kernels="reference", max_step_tokens=32, max_step_rows=1)
    prompt = tuple(case["prompt_ids"])
    runner.run(Batch((Row("golden", prompt[:23], 0, BLOCKS, wants_logits=False, plan=DecodePlan.PLAN_ONCE),)))
    pending, position = prompt[23:], 23
    for step, token in enumerate(case["token_ids"]):
        plan = DecodePlan.REPLAN if step == 3 else DecodePlan.PLAN_ONCE
        logits = runner.run(Batch((Row("golden", pending, position, BLOCKS, True, plan),))).logits
        assert torch.equal(bits(logits[0]), bits(expected[step])), f"step {step}"
        pending, position = (token,), position + len(pending)
