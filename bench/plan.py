"""`python -m bench plan`: both plan modes side by side over equally primed pools, in process.

Each mode decodes the same prompts with a runner and a pool of its own. The arms take turns of `ROUND` tokens,
and who goes first alternates, so that a machine that slows down slows both. After every round their logits
are compared bit for bit. Knows the runner as the engine does and nothing of gRPC.
"""

import gc
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.arms import Arm, Step
from bench.loading import BLOCK_SIZE, MAX_STEP_ROWS, Bench, counted, scattered_tables
from worker.batch import DecodePlan
from worker.plan.gate import GateFailed, GateReport, check_plan_parity, ragged_steps

ROUND = 16
_GATE_SESSIONS = 16
_GATE_STEPS = 24
_GATE_BLOCKS = 128
_GATE_STEP_TOKENS = 512

MAX_OUTSIDE_FEW = 0.06
MAX_OUTSIDE_MANY = 0.03
MANY_SESSIONS = 8
MAX_HOST_BYTES = 256


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """What one mode's decode steps took; a step draws one token for every session.

    Attributes:
        ms_per_token: Median time of `Runner.launch` and `read`: what each session waits for its token.
        p95_ms_per_token: Of these times.
        plan_ms_per_token: Median part of it that got and bound the plan.
        sampling_ms_per_token: Median part of it that drew all sessions' tokens.
        launches_per_token: Kernel launches of a step, shared by its sessions.
        host_bytes_per_token: Mean bytes between host and program, per token and session.
        builds: Held plans built, prefill included, as the next two.
        reuses: Steps that replayed the held plan.
        replans: Steps on a plan of their own.
        arena_bytes: Intermediate results of the program.
        outside_share: Part of the summed time that neither a kernel's body nor a draw ran.
        median_outside_share: Median of the steps' own shares.
        total_ms: Per step, for the picture, as `plan_ms`.
        plan_ms: Per step.
    """

    ms_per_token: float
    p95_ms_per_token: float
    plan_ms_per_token: float
    sampling_ms_per_token: float
    launches_per_token: int
    host_bytes_per_token: float
    builds: int
    reuses: int
    replans: int
    arena_bytes: int
    outside_share: float
    median_outside_share: float
    total_ms: tuple[float, ...]
    plan_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both modes with one number of sessions.

    Attributes:
        num_sessions: Rows of every decode step.
        arms: By mode.
        tokens_equal: Whether all sessions' tokens are the same in both.
        max_logit_difference: Over all steps and rows; bits that differ without a difference count as inf.
        ratio: Median ms per token of REPLAN over that of PLAN_ONCE.
    """

    num_sessions: int
    arms: dict[DecodePlan, ArmFigures]
    tokens_equal: bool
    max_logit_difference: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, and whether it was kept.

    Attributes:
        passed: Whether it was.
        text: What was promised and what was measured.
        is_speed: Whether it is about time, which other work on the machine takes too.
    """

    passed: bool
    text: str
    is_speed: bool = False


def check_sizes(bench: Bench, num_sessions: int, *, prompt_tokens: int, tokens: int) -> None:
    """Raises ValueError for what `compare` would refuse: too many sessions, or too short a context."""
    if num_sessions > MAX_STEP_ROWS:
        raise ValueError(f"--sessions: {num_sessions} are over {MAX_STEP_ROWS}")
    total, most = prompt_tokens + tokens + 1, bench.llama.config.max_context_tokens
    if total > most:
        raise ValueError(f"--prompt-tokens, --tokens: {total} are over the model's {most}")


def compare(bench: Bench, num_sessions: int, *, prompt_tokens: int, tokens: int) -> Comparison:
    """Decodes `tokens` tokens in each of `num_sessions` sessions, in both modes.

    Args:
        bench: What is measured.
        num_sessions: At most `MAX_STEP_ROWS`.
        prompt_tokens: Random ids, another prompt for each session.
        tokens: Decode steps that are measured; one token before them comes from the prompt's last step.

    Raises:
        ValueError: Too many sessions, or the model's context is too short.
    """
    check_sizes(bench, num_sessions, prompt_tokens=prompt_tokens, tokens=tokens)
    config = bench.llama.config
    total = prompt_tokens + tokens + 1
    rng = random.Random(num_sessions)  # noqa: S311 - prompts, no secret
    prompts = [[rng.randrange(config.vocab_size) for _ in range(prompt_tokens)] for _ in range(num_sessions)]
    num_blocks = 2 * num_sessions * -(-total // BLOCK_SIZE)
    tables = scattered_tables(num_sessions, total, num_blocks)
    arms = {
        plan: Arm(
            plan,
            bench.runner(bench.pool(num_blocks)),
            prompts=prompts,
            block_tables=tables,
            vocab_size=config.vocab_size,
            max_step_tokens=bench.max_step_tokens,
        )
        for plan in DecodePlan
    }
    difference = _difference(*(np.stack(arm.prefill()) for arm in arms.values()))
    for number, start in enumerate(range(0, tokens, ROUND)):
        count = min(ROUND, tokens - start)
        logits = {}
        for arm in list(arms.values())[:: 1 if number % 2 == 0 else -1]:
            # What one arm left behind is not collected in the other's time.
            gc.collect()
            logits[arm.plan] = np.stack(arm.decode(count))
        difference = max(difference, _difference(*(logits[plan] for plan in DecodePlan)))
    figures = {plan: _figures(arm) for plan, arm in arms.items()}
    return Comparison(
        num_sessions=num_sessions,
        arms=figures,
        tokens_equal=arms[DecodePlan.PLAN_ONCE].logs == arms[DecodePlan.REPLAN].logs,
        max_logit_difference=difference,
        ratio=figures[DecodePlan.REPLAN].ms_per_token / figures[DecodePlan.PLAN_ONCE].ms_per_token,
    )


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    """Largest absolute difference of two float32 arrays; inf where only bits differ, as those of NaNs."""
    if np.array_equal(one.view(np.int32), other.view(np.int32)):
        return 0.0
    largest = float(np.abs(one - other).max())
    return largest if largest > 0.0 else float("inf")


def _figures(arm: Arm) -> ArmFigures:
    steps = arm.steps
    sizes = {(step.result.launches, step.result.arena_bytes) for step in steps}
    if len(sizes) != 1:
        raise GateFailed(
            f"{arm.plan.name}: (launches, arena bytes) of its steps are {sorted(sizes)}, not one"
        )
    ((launches, arena_bytes),) = sizes
    total_ms = _each(steps, lambda step: step.wall_ns / 1e6)
    plan_ms = _each(steps, lambda step: step.result.plan_ns / 1e6)
    wall_ns = sum(step.wall_ns for step in steps)
    inside_ns = sum(step.inside_ns for step in steps)
    return ArmFigures(
        ms_per_token=statistics.median(total_ms),
        p95_ms_per_token=float(np.percentile(total_ms, 95)),
        plan_ms_per_token=statistics.median(plan_ms),
        sampling_ms_per_token=statistics.median(_each(steps, lambda step: step.sampling_ns / 1e6)),
        launches_per_token=launches,
        host_bytes_per_token=statistics.mean(s.result.host_bytes / s.result.batch_size for s in steps),
        builds=arm.runner.builds,
        reuses=arm.runner.reuses,
        replans=arm.runner.replans,
        arena_bytes=arena_bytes,
        outside_share=1.0 - inside_ns / wall_ns,
        median_outside_share=statistics.median(step.outside_share for step in steps),
        total_ms=total_ms,
        plan_ms=plan_ms,
    )


def _each(steps: Sequence[Step], of: Callable[[Step], float]) -> tuple[float, ...]:
    return tuple(of(step) for step in steps)


def run_gate(bench: Bench) -> GateReport:
    """The parity gate over fresh runners and pools of this model, in ragged steps of up to 16 rows.

    Raises:
        GateFailed: The modes differ, or one did not do what it promises.
    """
    steps = ragged_steps(
        num_steps=_GATE_STEPS,
        num_sessions=_GATE_SESSIONS,
        vocab_size=bench.llama.config.vocab_size,
        block_size=BLOCK_SIZE,
        num_blocks=_GATE_BLOCKS,
        seed=0,
    )
    noise = torch.Generator().manual_seed(0)
    pools = [bench.pool(_GATE_BLOCKS) for _ in range(2)]
    if pools[0].data.is_floating_point():
        pools[0].data.normal_(generator=noise)
    else:
        pools[0].data.random_(generator=noise)
    pools[1].data.copy_(pools[0].data)
    once, replan = (bench.runner(pool, max_step_tokens=_GATE_STEP_TOKENS) for pool in pools)
    return check_plan_parity(once, replan, steps)


def promises(comparison: Comparison) -> list[Check]:
    """What must hold with one number of sessions, each promise with what was measured."""
    number = comparison.num_sessions
    once, replan = comparison.arms[DecodePlan.PLAN_ONCE], comparison.arms[DecodePlan.REPLAN]
    of = counted(number, "session")
    most = MAX_OUTSIDE_MANY if number >= MANY_SESSIONS else MAX_OUTSIDE_FEW
    return [
        Check(comparison.tokens_equal, f"{of}: the tokens of both modes are equal"),
        Check(
            comparison.max_logit_difference == 0.0,
            f"{of}: max |logit difference| {comparison.max_logit_difference:g}, promised 0",
        ),
        Check(
            once.launches_per_token == replan.launches_per_token,
            f"{of}: {once.launches_per_token} and {replan.launches_per_token} launches per token, equal",
        ),
        Check(
            (once.builds, once.replans) == (1, 0),
            f"{of}: PLAN_ONCE built {counted(once.builds, 'plan')} and replanned "
            f"{counted(once.replans, 'time')}, promised 1 and 0",
        ),
        Check(
            (replan.builds, replan.reuses) == (0, 0),
            f"{of}: REPLAN held {counted(replan.builds, 'plan')} and reused one "
            f"{counted(replan.reuses, 'time')}, promised 0",
        ),
        Check(
            once.median_outside_share <= most,
            f"{of}: {once.median_outside_share:.1%} of the runner's time outside kernels, at most {most:.0%}",
            is_speed=True,
        ),
        Check(
            once.host_bytes_per_token <= MAX_HOST_BYTES,
            f"{of}: {once.host_bytes_per_token:.0f} bytes per token and session, at most {MAX_HOST_BYTES}",
        ),
    ]
