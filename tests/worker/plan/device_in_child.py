"""What test_device_triton.py runs in another process: plans over Triton's kernels, under its interpreter."""

import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.tiny_model import write_tiny_gguf
from worker.batch import UNKNOWN_TOKEN, Batch, DecodePlan, Row, TokenClass
from worker.kernels.quantised import QuantisedMatrix
from worker.kernels.triton import prepare_triton
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.model.weights.gguf import read_gguf
from worker.params import Sampling
from worker.plan.gate import check_plan_parity, ragged_steps
from worker.plan.policy import StepLogits
from worker.runner import Runner
from worker.sampling import Draw

NUM_BLOCKS = 64
BLOCK_SIZE = 8
PROMPT = tuple(range(40, 51))
SAMPLINGS = {
    "greedy": Sampling(logprobs=0),
    "warm": Sampling(temperature=0.9, seed=7, top_k=30, top_p=0.95),
    "biased": Sampling(temperature=0.7, seed=9, logit_bias={50: 3.0, 51: -2.0}),
}


def model_in(folder: Path) -> LlamaModel:
    path = write_tiny_gguf(folder / "tiny.gguf", seed=7, num_layers=1, num_heads=6, max_context_tokens=128)
    return LlamaModel.from_gguf(read_gguf(path))


def runner_of(model: LlamaModel, kernels: str, dtype: torch.dtype = torch.float32) -> Runner:
    config = model.config
    kv = KvStorage(
        num_blocks=NUM_BLOCKS,
        num_layers=config.num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=dtype,
        keys_across=kernels != "triton",
    )
    kv.data.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
    return Runner(model, kv, kernels=kernels, max_step_tokens=32, max_step_rows=3)


class Recorded:
    """An arm of the gate, and the logits that it gave."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.logits: list[Tensor] = []

    def run(self, batch: Batch) -> StepLogits:
        step = self._runner.run(batch)
        self.logits.append(step.logits)
        return step

    def __getattr__(self, name: str) -> int:
        return getattr(self._runner, name)


def gate(folder: Path) -> None:
    """Both plan modes in both classes, over ragged steps; and the logits of the reference."""
    model = model_in(folder)
    steps = ragged_steps(
        num_steps=12, num_sessions=2, vocab_size=250, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, seed=3
    )
    for token_class in TokenClass:
        mine = [Batch(tuple(row._replace(token_class=token_class) for row in batch.rows)) for batch in steps]
        once = Recorded(runner_of(model, "triton"))
        report = check_plan_parity(once, runner_of(model, "triton"), mine)
        reference = runner_of(model, "reference")
        expected = [reference.run(batch).logits for batch in mine]
        differences = [
            float((got - wanted).abs().max())
            for got, wanted in zip(once.logits, expected, strict=True)
            if len(wanted)
        ]
        is_near = len(differences) > 6 and max(differences) < 2e-4
        print(report.launches_per_step, is_near)  # noqa: T201 - what the test reads


def generate(runner: Runner, *, ahead: bool, num_tokens: int) -> dict[str, list[int]]:
    """Prompts in two chunks, then tokens, each launched before the one before is read where that may be."""
    logs = {name: list(PROMPT[: 11 - place]) for place, name in enumerate(SAMPLINGS)}
    inputs = {name: len(log) for name, log in logs.items()}
    computed = dict.fromkeys(logs, 0)
    unread = None

    def read(step) -> None:
        for name, drawn in zip(logs, step.read().drawn, strict=True):
            logs[name][logs[name].index(UNKNOWN_TOKEN)] = drawn.token_id

    for number in range(num_tokens + 1):
        rows = []
        for place, (name, log) in enumerate(logs.items()):
            end = 3 if not number else len(log)
            token_class = TokenClass.PREFILL if computed[name] < inputs[name] else TokenClass.DECODE
            rows.append(
                Row(
                    name,
                    tuple(log[computed[name] : end]),
                    computed[name],
                    tuple(range(10 * place, 10 * place + 10)),
                    wants_logits=number > 0,
                    plan=DecodePlan.PLAN_ONCE,
                    token_class=token_class,
                )
            )
            computed[name] = end
        draws = [
            Draw(SAMPLINGS[name], tuple(logs[name]), len(logs[name]) - inputs[name], frozenset({5}))
            for name in logs
            if number
        ]
        step = runner.launch(Batch(tuple(rows)), draws)
        if unread is not None:
            read(unread)
            unread = None
        if not number:
            step.read()
            continue
        for log in logs.values():
            log.append(UNKNOWN_TOKEN)
        if ahead:
            unread = step
        else:
            read(step)
    if unread is not None:
        read(unread)
    return logs


def ahead(folder: Path) -> None:
    """Tokens launched ahead are those of steps that are read at once, and those of the reference."""
    model = model_in(folder)
    expected = generate(runner_of(model, "reference"), ahead=False, num_tokens=5)
    runner = runner_of(model, "triton")
    runner.warm_up()
    print(generate(runner, ahead=True, num_tokens=5) == expected)  # noqa: T201
    print(generate(runner_of(model, "triton"), ahead=False, num_tokens=5) == expected)  # noqa: T201
    print(runner.builds, runner.has_token_classes)  # noqa: T201
    half = generate(runner_of(model, "triton", torch.float16), ahead=True, num_tokens=3)
    print(all(len(log) > 10 and min(log) >= 0 for log in half.values()))  # noqa: T201


def splits() -> None:
    """Lowering and products cut K alike, whatever the weight's kind."""
    from worker.kernels.triton.linear import linear_kernel
    from worker.kernels.triton.product import make_product
    from worker.plan.triton_launchers import triton_kernels

    kinds = {"q8_0": 34, "q4_0": 18, "q4_1": 20}
    launchers = triton_kernels(torch.device("cpu")).launchers
    num_cases = 0
    for num_inputs in (64, 128, 192, 256, 384, 512):
        x = torch.zeros(1, num_inputs)
        weights: list[Tensor | QuantisedMatrix] = [
            torch.zeros(48, num_inputs),
            torch.zeros(48, num_inputs).half(),
        ]
        weights += [
            QuantisedMatrix.from_gguf(kind, torch.zeros(48, num_inputs // 32 * size, dtype=torch.uint8))
            for kind, size in kinds.items()
        ]
        for weight in weights:
            for token_class in TokenClass:
                planes = launchers.splits(weight, token_class)
                out = torch.empty(planes, 1, 48)
                product = make_product(
                    linear_kernel, x, weight, token_class=token_class, compute=None, config=None
                )
                num_cases += product.num_planes(out) == planes
    print(num_cases)  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare_triton()
    {"gate": gate, "ahead": ahead, "splits": lambda _: splits()}[sys.argv[1]](Path(sys.argv[2]))
