"""What `python -m bench paging` says: a table for people, one JSON object for programs."""

import sys
from collections.abc import Sequence
from dataclasses import asdict

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from bench.loading import Bench
from bench.paging import LIMIT, Pair, measure
from bench.plan import Check
from bench.plan_report import print_checks


def report(bench: Bench, contexts: Sequence[int], repeats: int, *, check: bool, as_json: bool) -> bool:
    """Measures and says what came of it; returns whether, with `check`, every whole step kept to the limit.

    Raises:
        ValueError: As `measure`.
    """
    pairs = measure(bench, contexts, repeats)
    checks = [Check(pair.step_ratio <= LIMIT, _text(pair), is_speed=True) for pair in pairs if check]
    if as_json:
        runs = [
            asdict(pair) | {"step_ratio": pair.step_ratio, "attention_ratio": pair.attention_ratio}
            for pair in pairs
        ]
        found = {"model": bench.name, "kernel_set": bench.kernels.kernel_set, "threads": bench.num_threads}
        found |= {"repeats": repeats, "runs": runs}
        if check:
            found["checks"] = [{"passed": each.passed, "text": each.text} for each in checks]
        sys.stdout.buffer.write(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
        sys.stdout.buffer.flush()
    else:
        console = Console(highlight=False)
        _print(console, bench, pairs)
        print_checks(console, checks)
    return all(each.passed for each in checks)


def _text(pair: Pair) -> str:
    return f"{pair.context} tokens, {pair.what}: step {pair.step_ratio:.3f}, at most {LIMIT}"


def _print(console: Console, bench: Bench, pairs: Sequence[Pair]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=bench.title)
    table.add_column("context", justify="right")
    table.add_column("what", no_wrap=True)
    for heading in ("step, ms", "ratio", "attention, ms", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pair in pairs:
        table.add_row(
            str(pair.context),
            pair.what,
            "{:.1f} / {:.1f}".format(*pair.step_ms),
            f"{pair.step_ratio:.3f}",
            "{:.2f} / {:.2f}".format(*pair.attention_ms),
            f"{pair.attention_ratio:.3f}",
        )
    console.print(table)
    console.print(
        f"Promised is the whole step's ratio, at most {LIMIT}; attention alone is shown beside it.",
        soft_wrap=True,
    )
