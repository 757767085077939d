"""The `pagecast` command: flags in, exit code out; each command calls one function elsewhere.

Exit codes: 0 done, 1 failed (one line `error: REASON: message` on stderr), 2 wrong flags, 130 interrupted.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click
from pydantic import ValidationError
from rich.console import Console

import pagecast
from service import commands
from service.config import ClientSettings

_PLANS = {"once": pagecast.PLAN_ONCE, "replan": pagecast.REPLAN}


def _option(flag: str, *name: str, **attributes: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option of a client command that PAGECAST_<NAME> can set too."""
    variable = "PAGECAST_" + flag.removeprefix("--").replace("-", "_").upper()
    return click.option(flag, *name, envvar=variable, show_envvar=True, **attributes)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pagecast", message="pagecast %(version)s")
def main() -> None:
    """Stream tokens from persistent LLM sessions."""


@main.command()
@click.option("--model", metavar="SPEC", help="A known model's name or a path to a GGUF file.")
@click.option("--workers", type=int, help="Worker processes to start.")
@click.option("--listen", metavar="HOST:PORT", help="Address of the public API.")
@click.option(
    "--worker-address",
    "worker_addresses",
    multiple=True,
    metavar="ADDR",
    help="Use this running worker; repeatable.",
)
@click.option("--kernels", type=click.Choice(["reference", "triton"]), help="Kernels of the workers.")
@click.option("--decode-plan", type=click.Choice(["once", "replan"]), help="Plan of sessions that name none.")
@click.option("--kv-blocks", type=int, help="KV blocks per worker.")
@click.option("--max-step-tokens", type=int, help="Token budget of one step.")
@click.option("--threads", type=int, help="Compute threads per worker.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
def serve(**flags: Any) -> None:
    """Run the gateway and its workers until SIGTERM or Ctrl-C.

    Every option can also be set as PAGECAST_<NAME>, e.g. PAGECAST_KV_BLOCKS; a flag wins.
    """
    # The client commands must start without the server's imports.
    from service.config import ServeSettings  # noqa: PLC0415
    from service.server import serve as run  # noqa: PLC0415

    given = {name: value for name, value in flags.items() if value not in (None, ())}
    with _settings_errors():
        settings = ServeSettings(**given)
    sys.exit(run(settings))


@main.command()
@click.argument("text")
@_option("--target", metavar="HOST:PORT", help="The server.")
@_option("--model", metavar="NAME", help="A served model; may be left out where there is only one.")
@_option("--plan", type=click.Choice(list(_PLANS)), help="How the decode step gets its plan.")
@_option("--max-tokens", type=click.IntRange(min=1), help="End after this many tokens.")
@_option("--temperature", type=float, help="0 is greedy (the default).")
@_option("--seed", type=click.IntRange(0, 2**64 - 1), help="Same seed, same tokens.")
@_option("--raw", is_flag=True, help="Take the text as it is, without the chat template.")
@_option("--json", "as_json", is_flag=True, help="Print one line of JSON at the end, and nothing before.")
@_option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Deadline of the reply in seconds.",
)
def generate(target: str | None, text: str, plan: str | None, *, as_json: bool, **options: Any) -> None:
    """Stream the reply to TEXT ("-" reads it from stdin) in a session of its own."""
    with _client(target) as client:
        turn = commands.Turn(
            text=sys.stdin.read() if text == "-" else text, plan=_PLANS[plan] if plan else None, **options
        )
        commands.generate(client, turn, sys.stdout, Console(stderr=True), as_json=as_json)


@main.command()
@_option("--target", metavar="HOST:PORT", help="The server.")
@_option("--json", "as_json", is_flag=True, help="Print one line of JSON per model.")
def models(target: str | None, *, as_json: bool) -> None:
    """List the models that sessions can be opened on."""
    with _client(target) as client:
        commands.models(client, sys.stdout, as_json=as_json)


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
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(1)


@contextmanager
def _settings_errors() -> Iterator[None]:
    """Turns wrong settings into one line that names the flag, and exit code 2."""
    try:
        yield
    except ValidationError as error:
        wrong = "; ".join(f"{_flag(problem['loc'])}: {problem['msg']}" for problem in error.errors())
        click.echo(f"error: {wrong}", err=True)
        sys.exit(2)


def _flag(location: tuple[int | str, ...]) -> str:
    """The flag of a settings field or of its environment variable."""
    name = str(location[0]).lower().removeprefix("pagecast_") if location else "settings"
    name = "worker_address" if name == "worker_addresses" else name
    return f"--{name.replace('_', '-')} (PAGECAST_{name.upper()})"


if __name__ == "__main__":
    main()
