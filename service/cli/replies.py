"""`pagecast generate` and `pagecast chat`."""

import sys
from dataclasses import replace

import click
from rich.console import Console

from service.cli.options import is_text, option, reply_options
from service.cli.running import client_of, output
from service.cli.text import given_text, input_lines
from service.commands.chat import chat_terminal
from service.commands.conversation import Conversation, chat_lines
from service.commands.replies import Choices
from service.commands.replies import generate as generate_reply


@click.command()
@click.argument("text")
@reply_options
@click.option(
    "--logprobs", type=click.IntRange(0, 20), metavar="N", help="With --json: logprobs, and the N likeliest."
)
@option("--raw", is_flag=True, help="Take the text as it is, without the chat template.")
@option("--json", "as_json", is_flag=True, help="Print one line of JSON at the end, and nothing before.")
def generate(
    target: str | None, text: str, choices: Choices, logprobs: int | None, *, raw: bool, as_json: bool
) -> None:
    """Stream the reply to TEXT ("-" reads it from stdin) in a session of its own."""
    if logprobs is not None and not as_json:
        raise click.UsageError("--logprobs shows with --json only.")
    options = choices.options | {"raw": raw, "logprobs": logprobs}
    taken, out = given_text(text), output(as_json=as_json)
    with client_of(target) as client:
        generate_reply(
            client, taken, replace(choices, options=options), out, Console(stderr=True), as_json=as_json
        )


@click.command()
@reply_options
@option("--system", metavar="TEXT", callback=is_text, help="What each session begins with.")
@option("--show-timing", is_flag=True, help="Print each reply's times and tokens.")
def chat(target: str | None, choices: Choices, system: str | None, *, show_timing: bool) -> None:
    """Talk in one session, turn by turn.

    Ctrl-C cuts a reply short, /help lists the commands. Where standard input or output is no
    terminal, each line is a turn and only the replies are printed.
    """
    console, out = Console(stderr=True), output()
    talk = out.is_terminal and sys.stdin is not None and sys.stdin.isatty()
    with client_of(target) as client, Conversation(client, choices, system, console) as conversation:
        if talk:
            chat_terminal(conversation, out, console, show_timing=show_timing)
        else:
            lines = (line.rstrip("\r\n") for line in input_lines())
            chat_lines(conversation, lines, out, console, show_timing=show_timing)
