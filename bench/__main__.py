"""`pagecast bench …`, also `python -m bench …`: what can be measured."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from bench.command_line import CHECK, JSON, fail, load, setting_options
from bench.cpu_commands import decode, ops, peers
from bench.gpu_check import gpu_check
from worker.config import prepare_process
from worker.plan.command_line import PictureFailed, PictureFile, Program

# What measures is imported where it is wanted: torch reads the environment when it is imported, and --help
# must not wait for it.


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure Pagecast: in process, through gateway and worker, beside other engines, on a GPU."""
    prepare_process()


@main.command()
@setting_options
@click.option("--repeats", type=click.IntRange(min=1), default=11, show_default=True, help="Of each step.")
def steps(repeats: int, **setting: Any) -> None:
    """Time single steps beside the floor."""
    bench = load(**setting)
    from bench.floor import Reader  # noqa: PLC0415
    from bench.steps import measure  # noqa: PLC0415

    measure(bench, repeats, Reader(bench.num_threads))


@main.command()
@setting_options
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Per session."
)
@click.option(
    "--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Drawn per session."
)
@click.option(
    "--sessions",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 8),
    show_default=True,
    help="That decode at once; repeatable.",
)
@CHECK
@JSON
@click.option("--plot", type=PictureFile(".png"), metavar="FILE.png", help="Draw what every token took.")
def plan(
    *,
    prompt_tokens: int,
    tokens: int,
    sessions: tuple[int, ...],
    check: bool,
    as_json: bool,
    plot: Path | None,
    **setting: Any,
) -> None:
    """Run PLAN_ONCE and REPLAN side by side, and prove them equal."""
    if plot is not None and find_spec("matplotlib") is None:
        fail(PictureFailed("--plot needs matplotlib: in the repository run `pip install '.[bench]'`"))
    bench = load(**setting)
    from bench.plan_report import Wish, report  # noqa: PLC0415
    from worker.plan.gate import GateFailed  # noqa: PLC0415

    wish = Wish(prompt_tokens, tokens, sessions, check=check, as_json=as_json, plot=plot)
    try:
        sys.exit(0 if report(bench, wish) else 1)
    except (ValueError, ArithmeticError, GateFailed, PictureFailed) as error:
        fail(error)


@main.command()
@setting_options
@click.option("--context", "contexts", type=click.IntRange(min=2), multiple=True, default=(128, 1024, 4096),
              show_default=True, help="Tokens of context; repeatable.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=25, show_default=True, help="Of each step.")
@CHECK
@JSON
def paging(*, contexts: tuple[int, ...], repeats: int, check: bool, as_json: bool, **setting: Any) -> None:
    """Time attention over blocks beside attention over dense keys and values."""
    if setting["kv_dtype"] not in ("auto", "float32"):
        fail(ValueError("--kv-dtype: attention over dense memory takes float32 alone"))
    bench = load(**setting | {"kv_dtype": "float32"})
    if bench.kernels.name != "native":
        fail(ValueError(f"paging is measured on native kernels, these are {bench.kernels.name}"))
    from bench.paging_report import report  # noqa: PLC0415

    try:
        sys.exit(0 if report(bench, contexts, repeats, check=check, as_json=as_json) else 1)
    except ValueError as error:
        fail(error)


@main.command()
@click.option(
    "--target", "targets", multiple=True, help="sm_80, sm_90, sm_100 or gfx942; repeatable.  [default: all]"
)
@click.option(
    "--op", "ops", multiple=True, help="Module of kernels, e.g. linear; repeatable.  [default: all]"
)
@click.option(
    "--all", "every_case", is_flag=True, help="Every config, not only the cases that cover each kernel."
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: len(os.sched_getaffinity(0)),
    help="Processes that compile side by side.  [default: the CPUs]",
)
@click.option("--package", default="worker.kernels.triton", hidden=True)
@CHECK
@JSON
def kernel_report(*, jobs: int, check: bool, as_json: bool, **wanted: Any) -> None:
    """Compile Triton's kernels for GPUs that are not here, and tell what became of them."""
    if missing := [name for name in ("torch", "triton") if find_spec(name) is None]:
        fail(ModuleNotFoundError(f"this needs {', '.join(missing)}: pip install '.[worker,triton]'"))
    from rich.console import Console  # noqa: PLC0415

    from bench import kernel_report as reports  # noqa: PLC0415

    try:
        report = reports.make_report(reports.Wish(num_jobs=jobs, **wanted))
    except (ValueError, RuntimeError) as error:
        fail(error)
    if as_json:
        click.echo(reports.as_json(report))
    else:
        reports.print_report(report, Console(width=None if sys.stdout.isatty() else 250))
    sys.exit(1 if check and report.failures else 0)


for command in (decode, ops, peers, gpu_check):
    main.add_command(command)


if __name__ == "__main__":
    main()
