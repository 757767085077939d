"""The parity gate: both plan modes over equally primed pools must agree bit for bit and count as promised.

Knows runners only by what they show: logits, results and counters.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.batch import Batch, DecodePlan, Row, RowResult

LEAST_STEPS = 12
"""Steps of `ragged_steps` in which the last session to join still gets to decode."""


class GateFailed(Exception):
    """The arms differ, or one did not do what its mode promises; the message tells which step and numbers."""


class StepOutcome(Protocol):
    """What the gate reads of one step."""

    @property
    def logits(self) -> Tensor:
        """[n, vocab] float32."""

    @property
    def results(self) -> tuple[RowResult, ...]:
        """One per row."""


class StepRunner(Protocol):
    """One arm of the gate."""

    @property
    def builds(self) -> int:
        """Held plans built."""

    @property
    def reuses(self) -> int:
        """Steps that replayed a held plan."""

    @property
    def replans(self) -> int:
        """Steps on a plan of their own."""

    def run(self, batch: Batch) -> StepOutcome:
        """Computes one batch."""


@dataclass(frozen=True, slots=True)
class GateReport:
    """What a passed gate covered.

    Attributes:
        num_steps: Steps that each arm ran.
        num_logit_rows: Rows of logits that were compared.
        launches_per_step: Kernel launches, equal in all steps of both arms.
    """

    num_steps: int
    num_logit_rows: int
    launches_per_step: int


def check_plan_parity(once: StepRunner, replan: StepRunner, steps: Sequence[Batch]) -> GateReport:
    """Runs every step in both modes and compares after each.

    Args:
        once: A fresh runner; its rows run as PLAN_ONCE.
        replan: A fresh runner over a pool of equal contents; its rows run as REPLAN.
        steps: At least one.

    Raises:
        GateFailed: Logits differ in a bit, launches differ, or PLAN_ONCE did not show one build and a
            reuse for every other step, or REPLAN a replan for every step and nothing held.
    """
    num_logit_rows = 0
    launches: set[int] = set()
    for number, batch in enumerate(steps):
        held = once.run(_in_mode(batch, DecodePlan.PLAN_ONCE))
        fresh = replan.run(_in_mode(batch, DecodePlan.REPLAN))
        if not torch.equal(held.logits.view(torch.int32), fresh.logits.view(torch.int32)):
            difference = (held.logits - fresh.logits).abs().max().item()
            raise GateFailed(f"step {number}: logits differ by up to {difference}")
        launches |= {result.launches for result in held.results + fresh.results}
        if len(launches) != 1:
            raise GateFailed(f"step {number}: launches per step are {sorted(launches)}, not one number")
        num_logit_rows += held.logits.shape[0]
    counted = {
        "PLAN_ONCE": (once.builds, once.reuses, once.replans),
        "REPLAN": (replan.builds, replan.reuses, replan.replans),
    }
    promised = {"PLAN_ONCE": (1, len(steps) - 1, 0), "REPLAN": (0, 0, len(steps))}
    for mode, numbers in counted.items():
        if numbers != promised[mode]:
            raise GateFailed(f"{mode}: (builds, reuses, replans) are {numbers}, promised {promised[mode]}")
    return GateReport(num_steps=len(steps), num_logit_rows=num_logit_rows, launches_per_step=launches.pop())


def _in_mode(batch: Batch, plan: DecodePlan) -> Batch:
    return Batch(tuple(row._replace(plan=plan) for row in batch.rows))


def ragged_steps(
    *,
    num_steps: int,
    num_sessions: int,
    vocab_size: int,
    block_size: int,
    num_blocks: int,
    seed: int,
    prompt_tokens: Sequence[int] = (),
) -> list[Batch]:
    """Steps of a busy worker: sessions join one by one, prefill in chunks, decode, and leave one by one.

    Blocks are scattered, and decoding crosses their borders. The first and the last step have one row, those
    in the middle third one of every session.

    Args:
        num_steps: At least 12, so that the last session to join decodes too.
        num_sessions: They join one after the other over the first third of the steps and leave, the last
            first, over the last third.
        vocab_size: Token ids are below it.
        block_size: Tokens per KV block.
        num_blocks: Of the pool; must hold every session to its end.
        seed: Same seed, same steps.
        prompt_tokens: Lengths of prompts, each computed in three chunks or more; sessions take them in turn.
            Absent: they end before, at and after the border of the second block, in chunks of random sizes.

    Raises:
        ValueError: `num_steps` is below 12, or a prompt has no token.
    """
    if num_steps < LEAST_STEPS:
        raise ValueError(f"num_steps={num_steps} is below {LEAST_STEPS}")
    if any(count < 1 for count in prompt_tokens):
        raise ValueError(f"prompt_tokens={tuple(prompt_tokens)} has one below 1")
    prompts = tuple(prompt_tokens) or tuple(2 * block_size - 1 + past for past in range(3))
    rng = random.Random(seed)  # noqa: S311 - test data, no secret
    free = rng.sample(range(num_blocks), num_blocks)
    pending = [prompts[session % len(prompts)] for session in range(num_sessions)]
    most = [-(-count // 3) if prompt_tokens else block_size + 3 for count in pending]
    computed = [0] * num_sessions
    tables: list[list[int]] = [[] for _ in range(num_sessions)]
    steps = []
    for step in range(num_steps):
        rows = []
        for session in range(num_sessions):
            turn = -(-session * num_steps // (3 * num_sessions))
            if not turn <= step < num_steps - turn:
                continue
            count = min(pending[session], rng.randint(1, most[session])) or 1
            pending[session] = max(0, pending[session] - count)
            while len(tables[session]) * block_size < computed[session] + count:
                tables[session].append(free.pop())
            rows.append(
                Row(
                    session_id=f"session-{session}",
                    token_ids=tuple(rng.randrange(vocab_size) for _ in range(count)),
                    position=computed[session],
                    block_table=tuple(tables[session]),
                    wants_logits=not pending[session],
                    plan=DecodePlan.PLAN_ONCE,
                )
            )
            computed[session] += count
        steps.append(Batch(tuple(rows)))
    return steps
