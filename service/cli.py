"""The `pagecast` command: flags in, exit code out; each command calls one function elsewhere.

Exit codes: 0 done, 1 failed (one line `error: REASON: message` on stderr), 2 wrong flags or text,
130 interrupted.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click
from click.core import ParameterSource
from pydantic import ValidationError
from rich.console import Console

import pagecast
from pagecast._log import LogWriter, open_log
from service import commands
from service.config import DEFAULT_ADDRESS, ClientSettings, ServeSettings, unknown_variables
from service.terminal import Output, OutputError
from service.validate import MAX_TEMPERATURE

_PLANS = {"once": pagecast.PLAN_ONCE, "plan_once": pagecast.PLAN_ONCE, "replan": pagecast.REPLAN}
_PLAN_CHOICE = click.Choice(list(_PLANS), case_sensitive=False)
_LEVELS = click.Choice(["debug", "info", "warning", "error"], case_sensitive=False)
_KERNELS = click.Choice(["reference", "triton"], case_sensitive=False)
_DAY_S = 86_400

_Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def _variable(flag: str) -> str:
    """The environment variable of a flag."""
    return "PAGECAST_" + flag.removeprefix("--").replace("-", "_").upper()


def _option(flag: str, *name: str, **attributes: Any) -> _Decorator:
    """An option of a client command that PAGECAST_<NAME> can set too."""
    return click.option(flag, *name, envvar=_variable(flag), show_envvar=True, **attributes)


def _serve_option(flag: str, field: str | None = None, **attributes: Any) -> _Decorator:
    """An option of `serve` for the field of that name of ServeSettings; shows the field's default."""
    name = field or flag.removeprefix("--").replace("-", "_")
    default = ServeSettings.model_fields[name].default
    return click.option(flag, name, default=default, show_default=True, **attributes)


def _number(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuses nan, which no range of click's does."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number.", context, parameter)
    return value


def _name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuses bytes that are not text."""
    if value is not None and _bad_character(value) is not None:
        raise click.BadParameter("is not UTF-8.", context, parameter)
    return value


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pagecast", message="pagecast %(version)s")
def main() -> None:
    """Stream tokens from persistent LLM sessions."""


@main.command()
@_serve_option("--model", metavar="SPEC", help="A known model's name or a path to a GGUF file.")
@_serve_option("--workers", type=int, help="Worker processes to start.")
@_serve_option("--listen", metavar="HOST:PORT", help="Address of the public API; port 0 takes a free one.")
@_serve_option(
    "--worker-address",
    "worker_addresses",
    multiple=True,
    metavar="ADDR",
    help="Use this running worker and start none; repeatable.",
)
@_serve_option("--kernels", type=_KERNELS, help="Kernels of the workers.")
@_serve_option(
    "--decode-plan", type=_PLAN_CHOICE, metavar="[once|replan]", help="Plan of sessions that name none."
)
@_serve_option("--kv-blocks", type=int, help="KV blocks per worker. Absent: what the worker chooses.")
@_serve_option("--max-step-tokens", type=int, help="Tokens of one step. Absent: what the worker chooses.")
@_serve_option(
    "--threads", type=int, help="Compute threads per worker. Absent: the CPUs, shared among the workers."
)
@_serve_option(
    "--start-timeout",
    "start_timeout_s",
    type=float,
    metavar="SECONDS",
    help="How long workers may take until they serve.",
)
@_serve_option("--log-level", type=_LEVELS, help="Least severe level that is logged.")
@click.pass_context
def serve(context: click.Context, /, **flags: Any) -> None:
    """Run the gateway and its workers until SIGTERM or Ctrl-C.

    Every option can also be set as PAGECAST_<NAME>, e.g. PAGECAST_KV_BLOCKS; a flag wins.
    """
    # The client commands must start without the server's imports.
    from service.server import serve as run  # noqa: PLC0415

    given = {
        name: value
        for name, value in flags.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    with _settings_errors():
        settings = ServeSettings(**given)
    if unknown := unknown_variables({_variable(option.opts[0]) for option in _options()}):
        with LogWriter(sys.stderr.buffer) as writer:
            open_log(writer, settings.log_level).warning("unknown_variables", variables=unknown)
    sys.exit(run(settings))


_TARGET = _option("--target", metavar="HOST:PORT", help=f"The server; {DEFAULT_ADDRESS} unless set.")


@main.command()
@click.argument("text")
@_TARGET
@_option(
    "--model",
    metavar="NAME",
    callback=_name,
    help="A served model; may be left out where there is only one. A path to a .gguf file stands for the "
    "name that `serve` gives it: the file's, without .gguf.",
)
@_option("--plan", type=_PLAN_CHOICE, metavar="[once|replan]", help="How the decode step gets its plan.")
@_option("--max-tokens", type=click.IntRange(1, 2**32 - 1), help="End after this many tokens.")
@_option(
    "--temperature",
    type=click.FloatRange(0, MAX_TEMPERATURE),
    callback=_number,
    help="0 is greedy (the default).",
)
@_option("--seed", type=click.IntRange(0, 2**64 - 1), help="Same seed, same tokens.")
@_option("--raw", is_flag=True, help="Take the text as it is, without the chat template.")
@_option("--json", "as_json", is_flag=True, help="Print one line of JSON at the end, and nothing before.")
@_option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, _DAY_S, min_open=True),
    callback=_number,
    metavar="SECONDS",
    help="Deadline of the reply.",
)
def generate(target: str | None, text: str, plan: str | None, *, as_json: bool, **options: Any) -> None:
    """Stream the reply to TEXT ("-" reads it from stdin) in a session of its own."""
    with _client(target) as client:
        turn = commands.Turn(text=_text(text), plan=_PLANS[plan] if plan else None, **options)
        out = Output(sys.stdout, "utf-8" if as_json else None)
        commands.generate(client, turn, out, Console(stderr=True), as_json=as_json)


@main.command()
@_TARGET
@_option("--json", "as_json", is_flag=True, help="Print one line of JSON per model.")
def models(target: str | None, *, as_json: bool) -> None:
    """List the models that sessions can be opened on; fails where there is none."""
    with _client(target) as client:
        commands.models(client, Output(sys.stdout, "utf-8" if as_json else None), as_json=as_json)


@contextmanager
def _client(target: str | None) -> Iterator[pagecast.Client]:
    """A client of the target; what goes wrong with it ends the process."""
    with _settings_errors():
        settings = ClientSettings() if target is None else ClientSettings(target=target)
    try:
        with pagecast.Client(settings.target) as client:
            yield client
    except pagecast.Unavailable as error:
        if error.reason != "UNAVAILABLE":
            _fail(str(error))
        # The transport's own reason: nobody answered there.
        _fail(f"UNAVAILABLE: no server answers at {settings.target}; start one with: pagecast serve")
    except (pagecast.PagecastError, commands.CommandError) as error:
        _fail(str(error))
    except OutputError as error:
        _fail(f"OUTPUT_FAILED: cannot write to standard output: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _text(argument: str) -> str:
    """TEXT, or what standard input holds where it is "-"; ends the process where that is no text."""
    if argument != "-":
        if (position := _bad_character(argument)) is not None:
            _fail(f"TEXT: not UTF-8 at character {position}", exit_code=2)
        return argument
    if sys.stdin is None:
        _fail("TEXT: standard input is closed", exit_code=2)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        _fail(f"TEXT: standard input is not UTF-8 at byte {error.start}", exit_code=2)
    except OSError as error:
        _fail(f"TEXT: standard input cannot be read: {error.strerror}", exit_code=2)


def _bad_character(value: str) -> int | None:
    """Position of the first character that stands for a byte that is no text; None: there is none."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _fail(message: str, exit_code: int = 1) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(exit_code)


@contextmanager
def _settings_errors() -> Iterator[None]:
    """Turns wrong settings into one line that names the flag, and exit code 2."""
    try:
        yield
    except ValidationError as error:
        wrong = [
            f"{_flag(problem['loc'])}: {problem.get('ctx', {}).get('error') or problem['msg']}"
            for problem in error.errors()
        ]
        _fail("; ".join(wrong), exit_code=2)


def _flag(location: tuple[int | str, ...]) -> str:
    """The flag of a settings field, which may be named as the field or as its environment variable."""
    name = str(location[0]).lower() if location else "settings"
    for option in _options():
        variable = _variable(option.opts[0])
        if name in (option.name, variable.lower()):
            return f"{option.opts[0]} ({variable})"
    return name


def _options() -> Iterator[click.Option]:
    """Every option of every command."""
    for command in main.commands.values():
        yield from (parameter for parameter in command.params if isinstance(parameter, click.Option))


if __name__ == "__main__":
    main()
