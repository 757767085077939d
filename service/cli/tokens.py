"""`pagecast tokenize` and `pagecast detokenize`."""

import click

from service.cli.options import JSON, MODEL, TARGET
from service.cli.running import client_of, fail, output
from service.cli.text import given_text
from service.commands.tokens import detokenize as write_text
from service.commands.tokens import tokenize as write_ids


@click.command()
@click.argument("text")
@TARGET
@MODEL
@click.option("--chat", is_flag=True, help="As a user message through the chat template, not as it is.")
@click.option("--ids", "ids_only", is_flag=True, help="Print the ids only, on one line.")
@JSON
def tokenize(
    target: str | None, model: str | None, text: str, *, chat: bool, ids_only: bool, as_json: bool
) -> None:
    """Print the token ids of TEXT ("-" reads it from stdin), and what each spells."""
    taken, out = given_text(text), output(as_json=as_json)
    with client_of(target) as client:
        write_ids(client, model, taken, out, chat=chat, ids_only=ids_only, as_json=as_json)


@click.command()
@click.argument("ids", nargs=-1, required=True)
@TARGET
@MODEL
def detokenize(target: str | None, model: str | None, ids: tuple[str, ...]) -> None:
    """Print the text that token IDS spell together ("-" reads them from stdin, between spaces)."""
    given = given_text("-").split() if ids == ("-",) else ids
    if not given:
        fail("IDS: standard input holds none", exit_code=2)
    token_ids, out = [_token_id(text) for text in given], output()
    with client_of(target) as client:
        write_text(client, model, token_ids, out)


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 1 << 32):
        fail(f"IDS: {text!r} is not a token id", exit_code=2)
    return int(text)
