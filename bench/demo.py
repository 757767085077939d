"""What `make demo` runs: a real server, a session of two turns, and both decode plans side by side.

`python -m bench.demo` starts a server of its own and stops it; `--target` uses one that runs. Exit
code 0 only where both plans gave the same tokens. Knows the public client and the command line, and
nothing of the inside of gateway or worker.
"""

import contextlib
import signal
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
from rich import box
from rich.console import Console
from rich.table import Table

import pagecast
from bench.server_process import ServerError, running_server
from service.commands.errors import CommandError
from service.commands.models import only_model

PROMPT = "Why is the sky blue? Answer in two sentences."
FOLLOW_UP = "And why is it red at sunset?"
LOG = Path(".run/demo.log")


@dataclass(frozen=True, slots=True)
class Arm:
    """One turn that was run: what it is called, in which plan mode, and what came of it."""

    name: str
    plan: pagecast.PagedDecodePlan
    result: pagecast.Result


@click.command()
@click.option("--target", metavar="HOST:PORT", help="Use this server instead of starting one.")
@click.option(
    "--model", metavar="SPEC", help="Model of the server that is started; with --target, a served one."
)
@click.option(
    "--max-tokens", type=click.IntRange(min=2), default=48, show_default=True, help="Tokens per turn."
)
def main(target: str | None, model: str | None, max_tokens: int) -> None:
    """Stream two turns of a session, then the first again with REPLAN, and compare."""
    console = Console(highlight=False)
    # SIGTERM must unwind like Ctrl-C does: the server that was started has to be stopped.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        with contextlib.nullcontext(target) if target else running_server(LOG, console, model) as address:
            equal = compare(address, model if target else None, max_tokens, console)
    except (pagecast.PagecastError, CommandError, ServerError) as error:
        Console(stderr=True, highlight=False).print(f"error: {error}", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0 if equal else 1)


def compare(target: str, model: str | None, max_tokens: int, console: Console) -> bool:
    """Run the three turns greedily and print them; True where both plans gave equal tokens.

    Raises:
        pagecast.PagecastError: A call failed.
        CommandError: No model is named, and there is none or a choice.
    """
    with pagecast.Client(target) as client:
        model = model or only_model(client)
        with client.open_session(model, plan=pagecast.PLAN_ONCE) as session:
            first = _stream(session, "turn 1", pagecast.PLAN_ONCE, PROMPT, max_tokens, console)
            second = _stream(session, "turn 2", pagecast.PLAN_ONCE, FOLLOW_UP, max_tokens, console)
            usage = second.result.usage
            console.print(
                f"[dim]turn 2 took in {usage.input_tokens} new tokens; of the session's earlier ones "
                f"{usage.cached_tokens} were cached, {usage.reprefilled_tokens} computed again[/]",
                soft_wrap=True,
            )
        with client.open_session(model, plan=pagecast.REPLAN) as session:
            again = _stream(session, "turn 1", pagecast.REPLAN, PROMPT, max_tokens, console)
    equal = first.result.token_ids == again.result.token_ids and len(first.result.token_ids) > 0
    console.print()
    console.print(table([first, second, again]))
    console.print(f"tokens equal: {'yes' if equal else 'no'}")
    return equal


def table(arms: list[Arm]) -> Table:
    """The arms' times, measured by this client, and their plan counters."""
    shown = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption="TTFT and median ITL in ms, seen by this client; kernel launches per step",
    )
    shown.add_column("arm", no_wrap=True)
    for heading in ("tokens", "TTFT", "ITL", "builds", "reuses", "replans", "launches"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for arm in arms:
        result, stats = arm.result, arm.result.plan_stats
        shown.add_row(
            f"{arm.plan.name} {arm.name}",
            str(len(result.token_ids)),
            "-" if result.ttft_ms is None else f"{result.ttft_ms:.1f}",
            f"{statistics.median(result.itl_ms):.1f}" if result.itl_ms else "-",
            *(str(count) for count in (stats.builds, stats.reuses, stats.replans, stats.launches_per_step)),
        )
    return shown


def _stream(
    session: pagecast.ClientSession,
    name: str,
    plan: pagecast.PagedDecodePlan,
    prompt: str,
    max_tokens: int,
    console: Console,
) -> Arm:
    console.print(f"\n[bold]{plan.name}[/], {name}: {prompt}")
    with session.generate(prompt, max_tokens=max_tokens, temperature=0.0) as generation:
        for chunk in generation:
            console.out(chunk.text, end="")
            console.file.flush()
    console.print()
    return Arm(name, plan, generation.result)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
