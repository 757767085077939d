"""How commands end: what goes wrong to one line and an exit code, signals to an orderly end."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import click
from pydantic import ValidationError

import pagecast
from service.commands.errors import CommandError
from service.config import ClientSettings
from service.terminal import Output, OutputError, visible


def variable(flag: str) -> str:
    """The environment variable of a flag."""
    return "PAGECAST_" + flag.removeprefix("--").replace("-", "_").upper()


def fail(message: str, exit_code: int = 1) -> NoReturn:
    """End the process with one line."""
    tell_error(message)
    sys.exit(exit_code)


def tell_error(message: object) -> None:
    """Write one line of the form that every failure has to standard error."""
    click.echo(f"error: {visible(' '.join(str(message).split()))}", err=True)


def output(*, as_json: bool = False) -> Output:
    """Standard output; ends the process where there is none."""
    try:
        return Output(sys.stdout, "utf-8" if as_json else None)
    except OutputError as error:
        _fail_output(error)


def _fail_output(error: OutputError) -> NoReturn:
    fail(f"OUTPUT_FAILED: cannot write to standard output: {error}")


@contextlib.contextmanager
def client_of(target: str | None) -> Iterator[pagecast.Client]:
    """A client of the target; what goes wrong with it ends the process, and so do signals, in order."""
    with settings_errors():
        settings = ClientSettings() if target is None else ClientSettings(target=target)
    try:
        with _ended_by_signals(), pagecast.Client(settings.target) as client:
            yield client
    except pagecast.Unavailable as error:
        if error.reason != "UNAVAILABLE":
            fail(str(error))
        # The transport's own reason: nobody answered there. Its words tell a port where nobody listens
        # from one where a connection comes about, and then nothing (HTTP/2 begins with SETTINGS).
        if "before receiving SETTINGS" in str(error):
            fail(f"UNAVAILABLE: {settings.target} accepts connections and does not answer")
        fail(f"UNAVAILABLE: no server answers at {settings.target}; start one with: pagecast serve")
    except (pagecast.PagecastError, CommandError) as error:
        fail(str(error))
    except OutputError as error:
        _fail_output(error)


@contextlib.contextmanager
def settings_errors() -> Iterator[None]:
    """Turns wrong settings into one line that names the flag of this command, and exit code 2."""
    try:
        yield
    except ValidationError as error:
        wrong = [
            f"{_flag(problem['loc'])}: {problem.get('ctx', {}).get('error') or problem['msg']}"
            for problem in error.errors()
        ]
        fail("; ".join(wrong), exit_code=2)


def _flag(location: tuple[int | str, ...]) -> str:
    """The flag of a settings field, which may be named as the field or as its environment variable."""
    name = str(location[0]).lower() if location else "settings"
    for option in click.get_current_context().command.params:
        flag = option.opts[0]
        if name in (option.name, variable(flag).lower()):
            return f"{flag} ({variable(flag)})"
    return name


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP unwind, so that sessions are closed on the way; an ignored one stays so.

    The client keeps gRPC out of reach of what they raise.
    """
    before = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGHUP)
        if (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    sys.exit(128 + number)
