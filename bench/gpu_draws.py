"""Draws on the device beside those of the host, from the same logits."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from bench.gpu_models import BLOCK_SIZE, SHALLOW, TINY, random_llama, random_pool
from bench.gpu_values import Case, Line, Setting
from worker.batch import Batch, DecodePlan, Row, TokenClass
from worker.params import Sampling
from worker.runner import Runner
from worker.sampling import Draw, draw_tokens

_WAYS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8),
    "top_k": Sampling(temperature=1.1, top_k=20),
    "top_p": Sampling(temperature=1.0, top_p=0.7),
    "min_p": Sampling(temperature=1.3, min_p=0.05),
    "all filters": Sampling(temperature=1.2, top_k=40, top_p=0.9, min_p=0.02),
    "penalties": Sampling(
        temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    ),
    "bias": Sampling(temperature=0.7, logit_bias={3: 4.0, 11: -2.0}),
    "logprob": Sampling(temperature=1.0, logprobs=0),
}
_LOGPROB_DIFFERENCE = 1e-3


def draw_cases(setting: Setting) -> list[Case]:
    """One for each way to draw."""
    ways = ("all filters", "penalties") if setting.is_tiny else tuple(_WAYS)
    return [Case(f"draws, {way}", partial(_compare, setting, way)) for way in ways]


def _compare(setting: Setting, way: str) -> Iterator[Line]:
    config, device = (TINY if setting.is_tiny else SHALLOW), torch.device(setting.device)
    count, rounds = (3, 1) if setting.is_tiny else (16, 8)
    dtype = torch.float32 if setting.is_tiny else torch.bfloat16
    runner = Runner(
        random_llama(config, dtype=dtype, device=device),
        random_pool(config, count, dtype=dtype, device=device),
        kernels="triton",
        max_step_tokens=count * BLOCK_SIZE,
        max_step_rows=count,
        vocab_size=config.vocab_size,
    )
    differences, worst, total = [], 0.0, 0
    for number in range(rounds):
        logs = [[(5 * row + 7 * at + number) % config.vocab_size for at in range(9)] for row in range(count)]
        batch = Batch(
            tuple(
                Row(str(row), tuple(log), 0, (row,), True, DecodePlan.PLAN_ONCE, TokenClass.PREFILL)
                for row, log in enumerate(logs)
            )
        )
        draws = [
            Draw(
                replace(_WAYS[way], seed=1000 * number + row),
                log,
                4,
                frozenset({2, 5}) if row % 3 == 0 else frozenset(),
            )
            for row, log in enumerate(logs)
        ]
        expected = draw_tokens(runner.run(batch).rows, draws, vocab_size=config.vocab_size)
        for row, (own, other) in enumerate(
            zip(runner.launch(batch, draws).read().drawn, expected, strict=True)
        ):
            total += 1
            if own is None or other is None or own.token_id != other.token_id:
                differences.append(f"round {number}, row {row}: {own} for {other}")
            elif other.logprob is not None:
                worst = max(worst, abs((own.logprob or 0.0) - other.logprob))
    note = f"{total} draws" if not differences else "; ".join(differences[:2])
    passed = not differences and worst <= _LOGPROB_DIFFERENCE
    yield Line(f"draws, {way}", float(len(differences)), "that differ", passed=passed, note=note)
