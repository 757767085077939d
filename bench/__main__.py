"""`pagecast bench …`, also `python -m bench …`: what can be measured."""

import gc
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from bench.gpu_check import gpu_check
from worker.config import prepare_process
from worker.plan.command_line import PictureFailed, PictureFile, Program, require_packages

if TYPE_CHECKING:
    from bench.loading import Bench
    from worker.kernel_choice import Wanted

# What measures is imported where it is wanted: torch reads the environment when it is imported, and --help
# must not wait for it.

# The native kernels' limit, as of a worker.
_MAX_THREADS = 256


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure Pagecast in process, without gateway and gRPC."""
    prepare_process()


def _setting(command: Callable[..., None]) -> Callable[..., None]:
    """Options that every bench has."""
    add = (
        click.option("--model", default="smollm2-135m", show_default=True, help="Model spec."),
        click.option(
            "--kernels",
            type=click.Choice(["auto", "native", "reference", "triton"], case_sensitive=False),
            default="auto",
            show_default=True,
            help="auto: native where it is installed and suits the model, else reference.",
        ),
        click.option(
            "--threads",
            type=click.IntRange(1, _MAX_THREADS),
            default=lambda: min(len(os.sched_getaffinity(0)), _MAX_THREADS),
            help="For kernels.  [default: the CPUs]",
        ),
    )
    for option in reversed(add):
        command = option(command)
    return command


_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
_CHECK = click.option("--check", is_flag=True, help="Say of each promise whether it was kept; exit 1 if not.")


def _load(model: str, kernels: "Wanted", threads: int) -> "Bench":
    """The model on these kernels; ends the process where there are none."""
    require_packages()
    if kernels == "triton":
        from worker.kernels.triton import prepare_triton  # noqa: PLC0415

        prepare_triton()
    from bench.loading import Bench  # noqa: PLC0415
    from worker.kernel_choice import KernelsMissing  # noqa: PLC0415
    from worker.model.config import ModelFileError  # noqa: PLC0415
    from worker.plan.executor import KernelsUnsuitable  # noqa: PLC0415

    try:
        bench = Bench.load(model, kernels=kernels, num_threads=threads)
    except (ModelFileError, KernelsMissing, KernelsUnsuitable) as error:
        _fail(error)
    gc.collect()
    gc.freeze()  # as a worker does
    if bench.kernels.fallback:
        click.echo(f"reference kernels: {bench.kernels.fallback}", err=True)
    return bench


def _fail(error: Exception) -> NoReturn:
    click.echo(f"error: {error}", err=True)
    sys.exit(1)


@main.command()
@_setting
@click.option("--repeats", type=click.IntRange(min=1), default=11, show_default=True, help="Of each step.")
def steps(repeats: int, **setting: Any) -> None:
    """Time single steps beside the floor."""
    bench = _load(**setting)
    from bench.steps import measure  # noqa: PLC0415

    measure(bench, repeats)


@main.command()
@_setting
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
@_CHECK
@_JSON
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
        _fail(PictureFailed("--plot needs matplotlib: in the repository run `pip install '.[bench]'`"))
    bench = _load(**setting)
    from bench.plan_report import Wish, report  # noqa: PLC0415
    from worker.plan.gate import GateFailed  # noqa: PLC0415

    wish = Wish(prompt_tokens, tokens, sessions, check=check, as_json=as_json, plot=plot)
    try:
        sys.exit(0 if report(bench, wish) else 1)
    except (ValueError, ArithmeticError, GateFailed, PictureFailed) as error:
        _fail(error)


@main.command()
@_setting
@click.option("--context", "contexts", type=click.IntRange(min=2), multiple=True, default=(128, 1024, 4096),
              show_default=True, help="Tokens of context; repeatable.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=25, show_default=True, help="Of each step.")
@_CHECK
@_JSON
def paging(*, contexts: tuple[int, ...], repeats: int, check: bool, as_json: bool, **setting: Any) -> None:
    """Time attention over blocks beside attention over dense keys and values."""
    bench = _load(**setting)
    if bench.kernels.name != "native":
        _fail(ValueError(f"paging is measured on native kernels, these are {bench.kernels.name}"))
    from bench.paging_report import report  # noqa: PLC0415

    try:
        sys.exit(0 if report(bench, contexts, repeats, check=check, as_json=as_json) else 1)
    except ValueError as error:
        _fail(error)


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
@_CHECK
@_JSON
def kernel_report(*, jobs: int, check: bool, as_json: bool, **wanted: Any) -> None:
    """Compile Triton's kernels for GPUs that are not here, and tell what became of them."""
    if missing := [name for name in ("torch", "triton") if find_spec(name) is None]:
        _fail(ModuleNotFoundError(f"this needs {', '.join(missing)}: pip install '.[worker,triton]'"))
    from rich.console import Console  # noqa: PLC0415

    from bench import kernel_report as reports  # noqa: PLC0415

    try:
        report = reports.make_report(reports.Wish(num_jobs=jobs, **wanted))
    except (ValueError, RuntimeError) as error:
        _fail(error)
    if as_json:
        click.echo(reports.as_json(report))
    else:
        reports.print_report(report, Console(width=None if sys.stdout.isatty() else 250))
    sys.exit(1 if check and report.failures else 0)


main.add_command(gpu_check)


if __name__ == "__main__":
    main()
