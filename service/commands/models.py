"""Models: which are served, and under which name."""

from collections.abc import Sequence
from pathlib import PurePath

import pagecast
from pagecast.v1 import model_pb2
from service.commands.errors import CommandError
from service.commands.records import json_line, record
from service.terminal import Output


def models(client: pagecast.Client, out: Output, *, as_json: bool) -> None:
    """Write the served models to `out`: a table, or one line of JSON for each.

    Raises:
        CommandError: None is served.
        OutputError: `out` cannot be written to.
        pagecast.PagecastError: A call failed.
    """
    found = served(client)
    if as_json:
        out.write("".join(json_line(record(model)) for model in found))
        return
    rows = [
        (
            model.name,
            model.architecture,
            f"{model.num_parameters:,}",
            f"{model.max_context_tokens:,}",
            str(model.block_size),
            "yes" if model.has_chat_template else "no",
        )
        for model in found
    ]
    numbers = ("parameters", "context tokens", "block size")
    out.table(("model", "architecture", *numbers, "chat"), rows, numbers)


def model_name(client: pagecast.Client, spec: str | None) -> str:
    """The name to open sessions with: what `spec` stands for, or the only model served.

    Raises:
        CommandError: No spec, and there is no model or a choice.
        pagecast.PagecastError: A call failed.
    """
    return only_model(client) if spec is None else served_model(spec)


def only_model(client: pagecast.Client) -> str:
    """The name of the only model served. Raises CommandError where there is none or a choice."""
    names = [model.name for model in served(client)]
    if len(names) > 1:
        raise CommandError(
            "FIELD_REQUIRED", f"name one of the served models with --model: {', '.join(names)}"
        )
    return names[0]


def served_model(spec: str) -> str:
    """The name that a model spec is served under: a .gguf file's is its name without the suffix."""
    return PurePath(spec).stem if spec.endswith(".gguf") else spec


def served(client: pagecast.Client) -> Sequence[model_pb2.Model]:
    """The served models, at least one. Raises CommandError where there is none."""
    found = client.models()
    if not found:
        raise CommandError("NO_WORKER", "no worker is there")
    return found


def not_served(client: pagecast.Client, name: str, error: pagecast.ModelNotFound) -> CommandError:
    """The refusal of a name, with the names that would do. Raises CommandError where there are none."""
    names = ", ".join(model.name for model in served(client))
    return CommandError(error.reason, f"{name!r} is not served; served: {names}")
