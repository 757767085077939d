"""The `pagecast` command: flags in, exit code out; each command calls one function elsewhere.

Exit codes: 0 done, 1 failed (one line `error: REASON: message` on stderr), 2 wrong flags or text,
130 interrupted, 143 or 129 told to end by SIGTERM or SIGHUP.
"""

import os
import sys
from typing import Any

import click

from service.cli.measuring import bench, plan
from service.cli.replies import chat, generate
from service.cli.running import fail
from service.cli.serve import serve
from service.cli.sessions import models, sessions
from service.cli.tokens import detokenize, tokenize


class _Main(click.Group):
    """Ends with 130 where Ctrl-C comes at a moment that no command thinks of; click would say 1.

    And with one line where the system refuses, as where help is written to a full disk.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        """Parse the arguments and run what they name."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            # What could not be written would be tried again, and fail again, when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            fail(error.strerror or str(error))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(130)


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pagecast", message="pagecast %(version)s")
def main() -> None:
    """Stream tokens from persistent LLM sessions."""


for command in (serve, generate, chat, sessions, models, tokenize, detokenize, bench, plan):
    main.add_command(command)
