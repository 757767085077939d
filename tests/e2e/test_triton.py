"""The Triton kernel in a real worker, under the interpreter where there is no GPU, against the reference."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pagecast
from tests.e2e.agreement import assert_ids_agree
from tests.e2e.server import running_server
from worker.batch import Batch, DecodePlan, Row
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.model.weights.gguf import read_gguf
from worker.runner import Runner

pytestmark = [pytest.mark.e2e, pytest.mark.triton]
NUM_TOKENS = 20
# One token, a block's border from both sides, several chunks of the step's budget.
PROMPTS = [[9], list(range(15)), list(range(40, 56)), [(7 * n) % 250 for n in range(61)]]


@pytest.fixture(scope="module")
def client(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pagecast.Client]:
    flags = ("--model", str(tiny_path), "--kernels", "triton", "--max-step-tokens", "24")
    with (
        running_server(tmp_path_factory.mktemp("triton"), *flags) as server,
        pagecast.Client(server.target) as client,
    ):
        yield client


def _reference(path: Path, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy ids on the reference kernels, and the margin at each."""
    file = read_gguf(path)
    config = file.config
    storage = KvStorage(
        num_blocks=8,
        num_layers=config.num_layers,
        block_size=16,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
    )
    runner = Runner(
        LlamaModel.from_gguf(file), storage, kernels="reference", max_step_tokens=128, max_step_rows=1
    )
    ids: list[int] = []
    margins: list[float] = []
    pending, position = list(prompt), 0
    for _ in range(NUM_TOKENS):
        row = Row(
            "s", tuple(pending), position, tuple(range(8)), wants_logits=True, plan=DecodePlan.PLAN_ONCE
        )
        top = torch.topk(runner.run(Batch((row,))).logits[0], 2)
        position += len(pending)
        pending = [int(top.indices[0])]
        ids += pending
        margins.append(float(top.values[0] - top.values[1]))
    return ids, margins


@pytest.mark.parametrize("plan", [pagecast.PLAN_ONCE, pagecast.REPLAN], ids=["plan_once", "replan"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)} tokens")
def test_ids_are_those_of_the_reference(
    client: pagecast.Client, tiny_path: Path, prompt: list[int], plan: pagecast.PagedDecodePlan
) -> None:
    expected, margins = _reference(tiny_path, prompt)
    assert len(set(expected)) > 5

    def generate(given: list[int], count: int) -> list[int]:
        with client.open_session("tiny", plan=plan) as session:
            return list(session.generate(given, max_tokens=count).wait().token_ids)

    assert_ids_agree(generate, prompt, expected, margins, min_margin=1e-3)


def test_the_worker_says_that_it_runs_on_triton(client: pagecast.Client) -> None:
    (model,) = client.models()
    assert "/triton/" in model.numerics_fingerprint
