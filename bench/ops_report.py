"""What `pagecast bench ops` says: a table for people, one JSON object for programs."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from bench.ops import Operator, Profile


def say(title: str, setting: Mapping[str, Any], found: Profile, *, as_json: bool) -> None:
    """Writes a profile."""
    if as_json:
        record = dict(setting) | asdict(found) | {"outside_us": found.outside_us}
        sys.stdout.buffer.write(orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        sys.stdout.buffer.flush()
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("operator", no_wrap=True)
    for heading in ("launches", "us per step", "share", "GB/s", "GMAC/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in found.operators:
        table.add_row(*_cells(each, found.step_us))
    outside = f"{found.outside_us:.0f}", f"{found.outside_us / found.step_us:.1%}"
    table.add_row("outside kernels", "", *outside, "", "")
    table.add_row("step", "", f"{found.step_us:.0f}", "", *_rates(found))
    table.add_row("reading alone", "", "", "", f"{found.bandwidth / 1e9:.1f}", "")
    console = Console(highlight=False)
    console.print(f"[bold]{title}[/]", soft_wrap=True)
    console.print(table)


def _cells(each: Operator, step_us: float) -> tuple[str, ...]:
    return (
        each.name,
        str(each.launches),
        f"{each.us:.0f}",
        f"{each.us / step_us:.1%}",
        _rate(each.work.read_bytes, each.us),
        _rate(each.work.macs, each.us),
    )


def _rates(found: Profile) -> tuple[str, str]:
    read_bytes = sum(each.work.read_bytes for each in found.operators)
    macs = sum(each.work.macs for each in found.operators)
    return _rate(read_bytes, found.step_us), _rate(macs, found.step_us)


def _rate(amount: float, us: float) -> str:
    """Billions per second; empty for nothing, as of operators that read and write activations alone."""
    return f"{amount / us / 1e3:.1f}" if amount and us else ""
