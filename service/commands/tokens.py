"""Text to token ids and back, as a served model's tokenizer has it."""

from collections.abc import Sequence

import orjson

import pagecast
from service.commands.models import model_name, not_served
from service.commands.records import json_line
from service.terminal import Output


def tokenize(
    client: pagecast.Client,
    spec: str | None,
    text: str,
    out: Output,
    *,
    chat: bool,
    ids_only: bool,
    as_json: bool,
) -> None:
    """Write the ids of a text, each on a line with the text that it spells by itself, in JSON's quotes.

    A control token spells none: it is told as `(control)`, in JSON as null.

    Args:
        client: Whose tokenizer.
        spec: The model, as `Choices.model`.
        text: What to tokenise.
        out: Where to.
        chat: As a user message through the chat template, not as it is.
        ids_only: Only the ids, on one line.
        as_json: One line of JSON instead.

    Raises:
        CommandError: The model is not served, or none is named and there is none or a choice.
        OutputError: `out` cannot be written to.
        pagecast.PagecastError: A call failed.
    """
    name = model_name(client, spec)
    try:
        ids = client.tokenize(name, text, raw=not chat)
    except pagecast.ModelNotFound as error:
        raise not_served(client, name, error) from error
    if ids_only:
        out.write(json_line({"token_ids": ids}) if as_json else " ".join(map(str, ids)) + "\n")
        return
    spelt = {token_id: client.detokenize(name, [token_id]) or None for token_id in dict.fromkeys(ids)}
    if as_json:
        out.write(json_line({"token_ids": ids, "pieces": [spelt[token_id] for token_id in ids]}))
        return
    # JSON's quotes escape control characters and show spaces at the ends.
    pieces = {
        token_id: orjson.dumps(text).decode() if text else "(control)" for token_id, text in spelt.items()
    }
    out.write("".join(f"{token_id}\t{pieces[token_id]}\n" for token_id in ids))


def detokenize(client: pagecast.Client, spec: str | None, token_ids: Sequence[int], out: Output) -> None:
    """Write the text that ids spell together, and a newline. Raises as `tokenize`."""
    name = model_name(client, spec)
    try:
        out.write(client.detokenize(name, token_ids))
    except pagecast.ModelNotFound as error:
        raise not_served(client, name, error) from error
    out.end_line()
