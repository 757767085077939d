"""What the commands of `pagecast bench` share: their options, and the model that they name."""

import gc
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

from worker.config import default_threads
from worker.plan.command_line import require_packages

if TYPE_CHECKING:
    from bench.loading import Bench
    from worker.kernel_choice import Wanted

# What measures is imported where it is wanted: torch reads the environment when it is imported, and --help
# must not wait for it.

MAX_THREADS = 256
"""The native kernels' limit, as of a worker."""


def setting_options(command: Callable[..., None]) -> Callable[..., None]:
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
            type=click.IntRange(1, MAX_THREADS),
            default=default_threads,
            help="For kernels.  [default: the CPUs]",
        ),
        click.option(
            "--weights",
            type=click.Choice(["auto", "file", "float32", "float16", "bfloat16"]),
            default="auto",
            show_default=True,
            help="What matrices are kept as; as a worker's flag, like the next two.",
        ),
        click.option(
            "--activations",
            type=click.Choice(["auto", "float32", "int8", "bfloat16"]),
            default="auto",
            show_default=True,
            help="What products are made of.",
        ),
        click.option(
            "--kv-dtype",
            type=click.Choice(["auto", "float32", "float16", "bfloat16", "int8"]),
            default="auto",
            show_default=True,
            help="What keys and values are kept as.",
        ),
    )
    for option in reversed(add):
        command = option(command)
    return command


JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
CHECK = click.option("--check", is_flag=True, help="Say of each promise whether it was kept; exit 1 if not.")


def load(model: str, kernels: "Wanted", threads: int, **numbers: Any) -> "Bench":
    """The model on these kernels, in these numbers; ends the process where they are not to be had."""
    require_packages()
    if kernels == "triton":
        from worker.kernels.triton import prepare_triton  # noqa: PLC0415

        prepare_triton()
    from bench.loading import Bench  # noqa: PLC0415
    from worker.kernel_choice import KernelsMissing, SettingRefused  # noqa: PLC0415
    from worker.model.config import ModelFileError  # noqa: PLC0415
    from worker.plan.executor import KernelsUnsuitable  # noqa: PLC0415

    try:
        bench = Bench.load(model, kernels=kernels, num_threads=threads, **numbers)
    except (ModelFileError, KernelsMissing, KernelsUnsuitable, SettingRefused) as error:
        fail(error)
    gc.collect()
    gc.freeze()  # as a worker does
    if bench.kernels.fallback:
        click.echo(f"reference kernels: {bench.kernels.fallback}", err=True)
    return bench


def unwind_on_sigterm() -> None:
    """SIGTERM unwinds as Ctrl-C does: processes that were started have to be ended."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def fail(error: Exception) -> NoReturn:
    """Says what went wrong in one line and ends the process."""
    click.echo(f"error: {error}", err=True)
    sys.exit(1)
