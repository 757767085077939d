"""`pagecast bench` and `pagecast plan`: each becomes a program of the worker's side, with its arguments.

Knows those programs by name alone: nothing that computes is imported here.
"""

import os
import sys
from importlib.util import find_spec
from typing import NoReturn

import click

from service.cli.running import fail

# What the worker's side computes with; found, not imported.
_NEEDED = ("torch", "numpy", "gguf", "tokenizers")
# Every argument is the program's own, `--help` too.
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}


@click.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure steps, plans and paging in process."""
    _become("bench", arguments)


@click.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(arguments: tuple[str, ...]) -> None:
    """Show what a model's decode plan is made of."""
    _become("worker.plan", arguments)


def _become(module: str, arguments: tuple[str, ...]) -> NoReturn:
    """Run `python -m module` with these arguments in place of this process."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        hint = "install the extra `worker`, in the repository with pip install '.[worker]'"
        fail(f"NOT_INSTALLED: this needs {', '.join(missing)}: {hint}")
    # -P: a folder of that name where the command is typed must not be taken for the installed one.
    # No shell, and both names are ours.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])  # noqa: S606
