"""What `pagecast bench peers` says: a table for people, one JSON object for programs."""

import statistics
import sys
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from bench.peers import Comparison, Found, Promise

SET_UP_HINT = "run `pagecast bench peers --set-up`"


def report(comparison: Comparison, *, threads: int, rounds: int, check: bool, as_json: bool) -> bool:
    """Says what came of it; returns whether, with `check`, every target that was judged was reached.

    A check of ours alone is a failed one: whoever asks for it wants to know of others.
    """
    promises = _checks(comparison) if check else []
    if as_json:
        sys.stdout.buffer.write(
            orjson.dumps(
                _record(comparison, threads=threads, rounds=rounds)
                | ({"checks": [_promise(each) for each in promises]} if check else {}),
                option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
            )
        )
        sys.stdout.buffer.flush()
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
        _print(console, comparison, threads=threads, rounds=rounds)
        for promise in promises:
            mark = "[green]PASS[/]" if promise.passed else "[red]FAIL[/]"
            console.print(f"{mark} {promise.text}", soft_wrap=True)
    return all(promise.passed for promise in promises)


def _checks(comparison: Comparison) -> list[Promise]:
    promises = [promise for found in comparison.found for promise in found.promises()]
    if not any(found.theirs_ms for found in comparison.found):
        promises.append(Promise("nothing was compared", passed=False))
    return promises


def _promise(promise: Promise) -> dict[str, Any]:
    return {"passed": promise.passed, "text": promise.text}


def line_of(found: Found) -> str:
    """A case in one line, as it is told while others still run."""
    ratios = [f"{found.ratio(peer):.2f} x {peer}" for peer in found.theirs_ms]
    if found.floor_ms is not None:
        ratios.insert(0, f"{found.ms / found.floor_ms:.2f} x floor")
    told = ", ".join([*ratios, *found.failed.values()])
    line = f"{found.group.name}, {found.case.name}: {found.ms:.2f} ms"
    return f"{line}; {told}" if told else line


def _record(comparison: Comparison, *, threads: int, rounds: int) -> dict[str, Any]:
    cases = [
        {
            "group": found.group.name,
            "case": found.case.name,
            "ours_ms": list(found.ours_ms),
            "theirs_ms": {name: list(times) for name, times in found.theirs_ms.items()},
            "ratios": {name: found.ratio(name) for name in found.theirs_ms},
            "floor_ms": found.floor_ms,
            "failed": dict(found.failed),
            "promises": [_promise(each) for each in found.promises()],
        }
        for found in comparison.found
    ]
    return {
        "threads": threads,
        "rounds": rounds,
        "bandwidths": list(comparison.bandwidths),
        "versions": dict(comparison.versions),
        "missing": dict(comparison.missing),
        "cases": cases,
    }


def _print(console: Console, comparison: Comparison, *, threads: int, rounds: int) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("weights, activations", "case", "beside"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ours, ms", "theirs, ms", "ratio", "to reach", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for found in comparison.found:
        for row in _rows(found):
            table.add_row(*row)
    console.print(table)
    told = [
        f"Medians of {rounds} rounds or more, {threads} threads; a step draws one token for each session."
    ]
    if comparison.bandwidths:
        told.append(f"Bandwidth {statistics.median(comparison.bandwidths) / 1e9:.1f} GB/s.")
    told += [", ".join(f"{name} {version}" for name, version in comparison.versions.items())]
    console.print(" ".join(filter(None, told)), soft_wrap=True)
    for what, reason in comparison.missing.items():
        console.print(f"not compared: {what}: {reason}", soft_wrap=True, markup=False)
    if comparison.missing:
        console.print(SET_UP_HINT, soft_wrap=True)


def _rows(found: Found) -> list[tuple[str, ...]]:
    """The floor, then every peer, or ours alone; an empty cell where nothing is promised."""
    group, case = found.group.name, found.case
    rows: list[tuple[str, ...]] = []
    if found.floor_ms is not None:
        times = found.ms / found.floor_ms
        most = case.most_times_floor
        told = ("", "") if most is None else (f"at most {most}", _met(met=times <= most))
        rows.append(
            (group, case.name, "floor", f"{found.ms:.2f}", f"{found.floor_ms:.2f}", f"{times:.2f}", *told)
        )
    for peer in (*found.theirs_ms, *found.failed):
        least = case.targets.get(peer)
        if peer in found.failed:
            rows.append((group, case.name, peer, f"{found.ms:.2f}", found.failed[peer], "", "", ""))
            continue
        ratio, theirs = found.ratio(peer), statistics.median(found.theirs_ms[peer])
        told = ("", "") if least is None else (f"{least} x", _met(met=ratio >= least))
        rows.append((group, case.name, peer, f"{found.ms:.2f}", f"{theirs:.2f}", f"{ratio:.2f}", *told))
    return rows or [(group, case.name, "nobody", f"{found.ms:.2f}", "", "", "", "")]


def _met(*, met: bool) -> str:
    return "met" if met else "NOT MET"
