"""`pagecast bench` and `pagecast plan`: each becomes a program of the worker's side, with its arguments.

Knows those programs by name alone: nothing that computes is imported here.
"""

import os
import sys
from typing import NoReturn

import click

# Every argument is the program's own, `--help` too.
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}


@click.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure steps, sessions, plans and paging: in process, through gRPC, beside other engines."""
    _become("bench.__main__", "bench", arguments)


@click.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(arguments: tuple[str, ...]) -> None:
    """Show what a model's decode plan is made of."""
    _become("worker.plan.__main__", "plan", arguments)


def _become(module: str, command: str, arguments: tuple[str, ...]) -> NoReturn:
    """Run the `main` of `module` with these arguments in place of this process, as `pagecast <command>`."""
    program = f"from {module} import main; main(prog_name='pagecast {command}')"
    # -P: a folder of that name where the command is typed must not be taken for the installed one.
    # No shell, and all names are ours.
    os.execv(sys.executable, [sys.executable, "-P", "-c", program, *arguments])  # noqa: S606
