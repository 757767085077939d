"""What `pagecast bench decode` says: tables for people, one JSON object for programs."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from bench.decode import Decode, Figures
from bench.loading import counted
from bench.plan import Check
from bench.plan_report import print_checks
from bench.served import Served, ServedDecode

JUDGED_CONTEXT = 128
NOTHING_PROMISED = "no promise is made for these weights and contexts"
MOST_TIMES_FLOOR: Mapping[str, float] = {"int8": 1.4, "float32": 1.12}
"""Of a single session's step, by what is multiplied. int8: with quantised weights; float32: with float32
weights."""
LEAST_SERVED_SHARE, SERVED_SESSIONS = 0.85, 16
MOST_ADDED_MS = 1.5
MOST_BESIDE_BYTES = 350_000_000
"""Of a worker's memory, beside weights and KV pool."""


def floor_checks(figures: Figures, kind: str | None) -> list[Check]:
    """What is promised of steps in process.

    Args:
        figures: Measured.
        kind: Key of `MOST_TIMES_FLOOR`; None: of these weights and activations nothing is promised.
    """
    if kind is None:
        return []
    most = MOST_TIMES_FLOOR[kind]
    return [
        Check(
            found.times_floor <= most,
            f"1 session, context {found.context}: {found.times_floor:.2f} x floor, at most {most}",
            is_speed=True,
        )
        for found in figures.decodes
        if (found.sessions, found.context) == (1, JUDGED_CONTEXT)
    ]


def served_checks(served: Served) -> list[Check]:
    """What is promised of steps through gateway and worker."""
    checks = []
    for found in served.decodes:
        name = f"{counted(found.sessions, 'session')}, context {found.context}"
        if found.sessions == SERVED_SESSIONS:
            text = f"{name}: {found.ratio:.2f} of the tokens in process, at least {LEAST_SERVED_SHARE}"
            checks.append(Check(found.ratio >= LEAST_SERVED_SHARE, text, is_speed=True))
        if found.sessions == 1:
            text = f"{name}: {found.added_ms:.2f} ms added to a token, at most {MOST_ADDED_MS}"
            checks.append(Check(found.added_ms <= MOST_ADDED_MS, text, is_speed=True))
    beside, most = (amount / 1e6 for amount in (served.beside_bytes, MOST_BESIDE_BYTES))
    text = f"worker: {beside:.0f} MB beside the weights' file and the KV pool, at most {most:.0f}"
    checks.append(Check(served.beside_bytes <= MOST_BESIDE_BYTES, text))
    return checks


def say(
    title: str,
    setting: Mapping[str, Any],
    found: Figures | Served,
    checks: Sequence[Check] | None,
    *,
    as_json: bool,
) -> bool:
    """Writes figures and checks; returns whether every check passed.

    Args:
        title: The setting in one line.
        setting: The same as items; they lead the JSON object.
        found: In process, or served.
        checks: None: not asked for.
        as_json: Print JSON in place of text.
    """
    if as_json:
        record = dict(setting) | _record(found)
        if checks is not None:
            record["checks"] = [{"passed": check.passed, "text": check.text} for check in checks]
            if not checks:
                record["note"] = NOTHING_PROMISED
        sys.stdout.buffer.write(orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        sys.stdout.buffer.flush()
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
        console.print(f"[bold]{title}[/]", soft_wrap=True)
        if isinstance(found, Figures):
            _print_figures(console, found)
        else:
            _print_served(console, found)
        print_checks(console, checks or ())
        if checks is not None and not checks:
            console.print(NOTHING_PROMISED, soft_wrap=True)
    return all(check.passed for check in checks or ())


def _record(found: Figures | Served) -> dict[str, Any]:
    if isinstance(found, Served):
        return {
            "through": "grpc",
            "decode": [
                asdict(each) | {"ratio": each.ratio, "added_ms": each.added_ms} for each in found.decodes
            ],
            "first_token": [asdict(each) for each in found.first_tokens],
            "worker_bytes": found.worker_bytes,
            "pool_bytes": found.pool_bytes,
            "file_bytes": found.file_bytes,
        }
    return {
        "through": "process",
        "weight_bytes": found.weight_bytes,
        "bandwidths": list(found.bandwidths),
        "decode": [_decode_record(each) for each in found.decodes],
        "first_token": [asdict(each) | {"ms": each.ms} for each in found.first_tokens],
    }


def _decode_record(found: Decode) -> dict[str, Any]:
    derived = {name: getattr(found, name) for name in ("ms", "tokens_per_s", "times_floor")}
    return asdict(found) | derived


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _print_figures(console: Console, found: Figures) -> None:
    if found.decodes:
        table = _table("sessions", "context", "ms per step", "tokens/s", "floor, ms", "x floor")
        for each in found.decodes:
            cells = f"{each.ms:.2f}", f"{each.tokens_per_s:.0f}", f"{each.floor_ms:.2f}"
            table.add_row(str(each.sessions), f"{each.context:,}", *cells, f"{each.times_floor:.2f}")
        console.print(table)
    if found.first_tokens:
        table = _table("prompt", "first token, ms", "prompt tokens/s")
        for first in found.first_tokens:
            table.add_row(f"{first.prompt:,}", f"{first.ms:.0f}", f"{first.prompt * 1e3 / first.ms:.0f}")
        console.print(table)
    console.print(
        f"A step draws one token for each session. Floor: {found.weight_bytes / 1e6:.1f} MB of weights, "
        f"keys and values, over {found.bandwidth / 1e9:.1f} GB/s "
        f"({min(found.bandwidths) / 1e9:.1f} to {max(found.bandwidths) / 1e9:.1f}).",
        soft_wrap=True,
    )


def _print_served(console: Console, found: Served) -> None:
    if found.decodes:
        names = list(found.decodes[0].cpu)
        table = _table(
            *(
                "sessions",
                "context",
                "tokens/s",
                "in process",
                "ratio",
                "ms per token",
                "in process",
                "added",
            ),
            *(f"CPU {name}" for name in names),
        )
        for each in found.decodes:
            table.add_row(*_served_cells(each), *(f"{each.cpu[name]:.0%}" for name in names))
        console.print(table)
    if found.first_tokens:
        table = _table("prompt", "first token, ms", "in process")
        for first in found.first_tokens:
            table.add_row(f"{first.prompt:,}", f"{first.ms:.0f}", f"{first.in_process_ms:.0f}")
        console.print(table)
    console.print(
        "Times per token are medians of what a session waits for its next one; 100% is one CPU. "
        f"The worker took {found.worker_bytes / 1e6:.0f} MB, of it the KV pool at most "
        f"{found.pool_bytes / 1e6:.0f} MB; the weights' file has {found.file_bytes / 1e6:.0f} MB.",
        soft_wrap=True,
    )


def _served_cells(each: ServedDecode) -> list[str]:
    rates = f"{each.tokens_per_s:.0f}", f"{each.in_process_tokens_per_s:.0f}", f"{each.ratio:.2f}"
    times = f"{each.itl_ms:.2f}", f"{each.in_process_ms:.2f}", f"{each.added_ms:.2f}"
    return [str(each.sessions), f"{each.context:,}", *rates, *times]
