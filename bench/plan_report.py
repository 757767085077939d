"""What `python -m bench plan` says: tables for people, one JSON object for programs."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from bench.loading import Bench, counted
from bench.plan import ROUND, ArmFigures, Check, Comparison, check_sizes, compare, promises, run_gate
from bench.plan_picture import draw
from worker.batch import DecodePlan
from worker.plan.decode_session import step_program
from worker.plan.gate import GateReport

_ROWS: dict[str, Callable[[ArmFigures], str]] = {
    "ms per token: the runner's time, median": lambda arm: f"{arm.ms_per_token:.2f}",
    "95th percentile": lambda arm: f"{arm.p95_ms_per_token:.2f}",
    "of it to get and bind the plan": lambda arm: f"{arm.plan_ms_per_token:.3f}",
    "of it to draw the tokens": lambda arm: f"{arm.sampling_ms_per_token:.3f}",
    "outside kernels, of all the runner's time": lambda arm: f"{arm.outside_share:.1%}",
    "of the median step": lambda arm: f"{arm.median_outside_share:.1%}",
    "kernel launches per token": lambda arm: str(arm.launches_per_token),
    "bytes host <-> program, per token, session": lambda arm: f"{arm.host_bytes_per_token:.1f}",
    "plans built / reused / replanned": lambda arm: f"{arm.builds} / {arm.reuses} / {arm.replans}",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asks for.

    Attributes:
        prompt_tokens: Per session.
        tokens: Drawn per session.
        sessions: Numbers of sessions.
        check: Whether the gate runs, and each promise is told and decides the exit status.
        as_json: Print JSON in place of text.
        plot: Where the picture goes; None: nowhere.
    """

    prompt_tokens: int
    tokens: int
    sessions: tuple[int, ...]
    check: bool
    as_json: bool
    plot: Path | None


def report(bench: Bench, wish: Wish) -> bool:
    """Measures and says what came of it.

    Returns:
        Whether the modes agreed and, with `wish.check`, every promise was kept.

    Raises:
        ValueError: A number does not fit the model.
        GateFailed: The modes differ, or one did not do what it promises.
        PictureFailed: The picture can't be written; all else has been said.
    """
    for number in wish.sessions:  # before anything is measured
        check_sizes(bench, number, prompt_tokens=wish.prompt_tokens, tokens=wish.tokens)
    checks = [Check(passed=True, text=_gate_text(run_gate(bench)))] if wish.check else []
    found = [
        compare(bench, number, prompt_tokens=wish.prompt_tokens, tokens=wish.tokens)
        for number in wish.sessions
    ]
    for comparison in found if wish.check else ():
        checks += promises(comparison)
    unshared_bytes = step_program(bench.llama, bench.pool(1), bench.capacity).unshared_bytes
    title = f"{bench.title}, {wish.prompt_tokens} prompt + {wish.tokens} drawn tokens"
    if wish.as_json:
        sys.stdout.buffer.write(
            as_json(_setting(bench, wish), found, unshared_bytes, checks if wish.check else None)
        )
        sys.stdout.buffer.flush()
    else:
        console = Console(highlight=False)
        console.print(f"[bold]{title}[/]", soft_wrap=True)
        for comparison in found:
            print_table(console, comparison, unshared_bytes)
        console.print(
            f"Both modes ran every step, {ROUND} tokens in turn; logits were compared after each turn.",
            soft_wrap=True,
        )
        print_checks(console, checks)
    if wish.plot is not None:
        draw(wish.plot, found, title)
    agreed = all(each.tokens_equal and each.max_logit_difference == 0.0 for each in found)
    return agreed and all(check.passed for check in checks)


def _gate_text(gate: GateReport) -> str:
    return (
        f"gate: {gate.num_logit_rows} rows of logits bit-equal in {gate.num_steps} ragged steps, "
        f"{gate.launches_per_step} launches in each"
    )


def _setting(bench: Bench, wish: Wish) -> dict[str, Any]:
    return {
        "model": bench.name,
        "kernels": bench.kernels.name,
        "kernel_set": bench.kernels.kernel_set,
        "threads": bench.num_threads,
        "prompt_tokens": wish.prompt_tokens,
        "tokens": wish.tokens,
        "tokens_in_turn": ROUND,
    }


def print_table(console: Console, comparison: Comparison, unshared_bytes: int) -> None:
    """Write the figures of one number of sessions.

    Args:
        console: Where to.
        comparison: Both modes.
        unshared_bytes: What the arena's results would take without sharing memory.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(f"{counted(comparison.num_sessions, 'session')}, a token each per step")
    for plan in comparison.arms:
        table.add_column(plan.name, justify="right", no_wrap=True)
    for name, cell in _ROWS.items():
        table.add_row(name, *(cell(arm) for arm in comparison.arms.values()))
    console.print(table)
    equal = "equal" if comparison.tokens_equal else "DIFFERENT"
    console.print(
        f"REPLAN / PLAN_ONCE {comparison.ratio:.2f}; tokens {equal}; "
        f"max |logit difference| {comparison.max_logit_difference:g}",
        soft_wrap=True,
    )
    arena = comparison.arms[DecodePlan.PLAN_ONCE].arena_bytes
    console.print(f"arena {arena:,} bytes; without sharing {unshared_bytes:,}\n", soft_wrap=True)


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """Write one line for each promise, and what figures of speed want where one of them was not kept."""
    for check in checks:
        mark = "[green]PASS[/]" if check.passed else "[red]FAIL[/]"
        console.print(f"{mark} {check.text}", soft_wrap=True)
    if any(check.is_speed and not check.passed for check in checks):
        console.print(
            "Figures of speed want an idle machine: look for other work on it, then run this again.",
            soft_wrap=True,
        )


def as_json(
    setting: dict[str, Any],
    comparisons: Sequence[Comparison],
    unshared_bytes: int,
    checks: Sequence[Check] | None,
) -> bytes:
    """One JSON object.

    Args:
        setting: What was measured; its items lead the object.
        comparisons: Become `runs`, with `arms` by mode.
        unshared_bytes: As in the table.
        checks: Become `checks`; None: they were not asked for.
    """
    runs = [
        {
            "sessions": comparison.num_sessions,
            "arms": {plan.name: _arm_record(arm) for plan, arm in comparison.arms.items()},
            "tokens_equal": comparison.tokens_equal,
            # Infinity, bits that differ without a difference, is no JSON.
            "max_logit_difference": str(comparison.max_logit_difference)
            if comparison.max_logit_difference == float("inf")
            else comparison.max_logit_difference,
            "replan_over_plan_once": comparison.ratio,
        }
        for comparison in comparisons
    ]
    found = setting | {"unshared_arena_bytes": unshared_bytes, "runs": runs}
    if checks is not None:
        found["checks"] = [{"passed": check.passed, "text": check.text} for check in checks]
    return orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _arm_record(arm: ArmFigures) -> dict[str, Any]:
    names = [name for name in ArmFigures.__dataclass_fields__ if name not in ("total_ms", "plan_ms")]
    return {name: getattr(arm, name) for name in names}
