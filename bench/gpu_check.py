"""One script that proves and measures Pagecast on a GPU: `python -m bench.gpu_check`.

Runs its sections one after the other, each in a process of its own and bounded in time; whatever becomes of
one, the next is run, and a table comes last. Before them all kernels are compiled, on all cores, so that what
measures finds them. Weights are random: nothing is downloaded. Imports no torch.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.gpu_values import Line

MINUTES = 6.0
"""What all sections take together at most."""
_START_S = 12.0
"""For a process to import torch and to end, beside what its section may take."""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the check.

    Attributes:
        name: For the table.
        module: What lists its cases.
        seconds: Its part of `MINUTES`; what is left over goes to those behind it.
        compiled_in: Processes that compile its kernels beforehand; 0 where others' are all that it has.
    """

    name: str
    module: str
    seconds: float
    compiled_in: int = 0


SECTIONS = (
    Section("card", "bench.gpu_card", 20),
    Section("correctness", "bench.gpu_correctness", 40, compiled_in=6),
    Section("invariance", "bench.gpu_invariance", 25, compiled_in=2),
    Section("plan", "bench.gpu_plan", 35),
    Section("blocks", "bench.gpu_blocks", 15),
    Section("kernels", "bench.gpu_kernels", 45, compiled_in=3),
    Section("TinyLlama-1.1B", "bench.gpu_tinyllama", 35, compiled_in=1),
    Section("Llama-3-8B", "bench.gpu_llama3", 40, compiled_in=1),
    Section("transformers", "bench.gpu_transformers", 60),
)
_COMPILE_S = 75.0
"""For compiling, likewise."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one section told.

    Attributes:
        section: Its name.
        lines: In the order in which they were found.
        seconds: What its process took.
    """

    section: str
    lines: tuple[Line, ...]
    seconds: float


def check(sections: Sequence[Section], *, device: str, minutes: float, is_dry: bool) -> Iterator[Found]:
    """Runs sections.

    Args:
        sections: In this order.
        device: `cuda` or `cpu`.
        minutes: For all of them.
        is_dry: Whether their cases are only listed.

    Yields:
        One for each, when it has ended.
    """
    parts = [] if is_dry or device == "cpu" else _parts(sections)
    compiling = _COMPILE_S if parts else 0.0
    scale = minutes * 60 / (compiling + sum(section.seconds for section in sections))
    spare = 0.0
    if parts:
        start = time.perf_counter()
        lines = tuple(_compile(parts, device, compiling * scale))
        seconds = time.perf_counter() - start
        spare = max(0.0, compiling * scale - seconds)
        yield Found("compile", lines, seconds)
    for section in sections:
        allowed = section.seconds * scale + spare
        start = time.perf_counter()
        lines = tuple(_run(section, device, allowed, ["dry"] if is_dry else []))
        seconds = time.perf_counter() - start
        spare = max(0.0, allowed - seconds)
        yield Found(section.name, lines, seconds)


def _parts(sections: Sequence[Section]) -> list[tuple[Section, int]]:
    return [(section, part) for section in sections for part in range(section.compiled_in)]


def _compile(parts: Sequence[tuple[Section, int]], device: str, seconds: float) -> Iterator[Line]:
    """Runs parts of sections side by side, a process on each core, for what they compile."""
    end = time.perf_counter() + seconds

    def run(place: tuple[Section, int]) -> list[Line]:
        section, part = place
        left = end - time.perf_counter()
        if left < _START_S:
            return [Line(f"{section.name}, part {part + 1}", note="left out: the time is up")]
        return list(_run(section, device, left, ["compile", str(part), str(section.compiled_in)]))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for lines in pool.map(run, parts):
            # What was not compiled in time is compiled later: that is no fault of any kernel.
            yield from (replace(line, passed=None) for line in lines)


def _run(section: Section, device: str, seconds: float, how: Sequence[str]) -> Iterator[Line]:
    # What a section may take is without its start, but the process ends with its time all the same.
    working = max(seconds - _START_S, seconds / 2)
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu_section", section.module, device, str(working), *how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, complaints = process.communicate(timeout=seconds)
        end = "" if process.returncode == 0 else f"the section ended with status {process.returncode}"
    except BaseException as error:
        # Its children too, such as compilers: they hold the pipes that are read to their end.
        os.killpg(process.pid, signal.SIGKILL)
        told, complaints = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        end = f"the section was ended after {seconds:.0f} s"
    for line in told.splitlines():
        # What libraries print is no line of ours, nor is one that was cut short.
        if line.startswith('{"name"') and line.endswith("}"):
            yield Line(**json.loads(line))
    if end:
        last = (complaints.strip().splitlines() or [""])[-1]
        yield Line(section.name, passed=False, note=f"{end}: {last[:300]}")


def failures(found: Sequence[Found]) -> list[str]:
    """A text for every check that failed."""
    return [
        f"{each.section}: {line.name}{f': {line.note}' if line.note else ''}"
        for each in found
        for line in each.lines
        if line.passed is False
    ]


def print_found(found: Sequence[Found], console: Console) -> None:
    """The table of all lines, and what failed."""
    table = Table("section", "what", "value", "floor", "share", "", "note")
    for each in found:
        for at, line in enumerate(each.lines):
            table.add_row(
                each.section if at == 0 else "",
                line.name,
                "" if line.value is None else f"{line.value:.4g} {line.unit}".strip(),
                "" if line.floor is None else f"{line.floor:.4g}",
                "" if line.share is None else f"{line.share:.0%}",
                {True: "PASS", False: "FAIL", None: ""}[line.passed],
                line.note,
            )
        table.add_section()
    console.print(table)
    checks = [line.passed for each in found for line in each.lines if line.passed is not None]
    for failure in failures(found):
        console.print(f"FAIL {failure}", markup=False, highlight=False, soft_wrap=True)
    seconds = sum(each.seconds for each in found)
    late = sum(line.note.endswith("time is up") for each in found for line in each.lines)
    left = f", {late} cases left out: --minutes is too short" if late else ""
    console.print(f"{sum(checks)} of {len(checks)} checks passed, in {seconds:.0f} s{left}", highlight=False)


def _as_json(found: Sequence[Found], *, device: str, is_dry: bool) -> str:
    sections = [
        {
            "section": each.section,
            "seconds": each.seconds,
            "lines": [{**asdict(line), "share": line.share} for line in each.lines],
        }
        for each in found
    ]
    told = {"device": device, "dry_run": is_dry, "failures": failures(found), "sections": sections}
    return json.dumps(told, indent=1)


@click.command("gpu-check", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True,
              help="cpu: tiny sizes on Triton's interpreter, which tries this script.")  # fmt: skip
@click.option(
    "--dry-run", "is_dry", is_flag=True, help="Import everything and list what would run; needs no GPU."
)
@click.option("--section", "names", multiple=True, type=click.Choice([each.name for each in SECTIONS]),
              help="Repeatable.  [default: all]")  # fmt: skip
@click.option(
    "--minutes", type=click.FloatRange(min=0.1), default=MINUTES, show_default=True, help="For all of it."
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write all of it here too.")  # fmt: skip
def gpu_check(
    *, device: str, is_dry: bool, names: tuple[str, ...], minutes: float, json_path: Path | None
) -> None:
    """Prove and measure kernels, plans and whole steps on a GPU; exit 1 if a check fails."""
    sections = [section for section in SECTIONS if not names or section.name in names]
    found = []
    for each in check(sections, device=device, minutes=minutes, is_dry=is_dry):
        found.append(each)
        click.echo(f"{each.section}: {len(each.lines)} lines in {each.seconds:.0f} s", err=True)
        if json_path is not None:  # each time, for who ends this before its end
            json_path.write_text(_as_json(found, device=device, is_dry=is_dry) + "\n")
    print_found(found, Console(width=None if sys.stdout.isatty() else 200))
    sys.exit(1 if failures(found) else 0)


if __name__ == "__main__":
    gpu_check(prog_name="python -m bench.gpu_check")
