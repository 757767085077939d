"""What the client commands do: talk to a server, write to the given output.

Knows the client and what a terminal shows; knows no flags, no exit codes and nothing of the server's inside.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import orjson
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

import pagecast
from pagecast.v1 import model_pb2
from service.terminal import Output, Waiting


class CommandError(Exception):
    """A command that cannot go on; `reason` is UPPER_SNAKE, `message` one sentence."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        self.message = message
        super().__init__(f"{reason}: {message}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn to generate in a session of its own.

    Attributes:
        text: One user message, or plain text where `raw`.
        model: A served name, or the path of the .gguf file that is served; None: the only one served.
        plan: None: the server's default.
        max_tokens: None: up to the context.
        temperature: None: greedy.
        seed: None: drawn by the server.
        raw: Append the text as it is, without the chat template.
        timeout_s: Deadline of the generation in seconds; None: none.
    """

    text: str
    model: str | None = None
    plan: pagecast.PagedDecodePlan | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    raw: bool = False
    timeout_s: float | None = None


def generate(client: pagecast.Client, turn: Turn, out: Output, console: Console, *, as_json: bool) -> None:
    """Run one turn in a new session and close it.

    Args:
        client: Where to run it.
        turn: What to run.
        out: Takes the text as it arrives, or with `as_json` one line of JSON at the end.
        console: Shows that the first token is being waited for, where it is a terminal.
        as_json: See `out`.

    Raises:
        CommandError: The model is not served, or none is named and there is none or a choice.
        OutputError: `out` cannot be written to.
        pagecast.PagecastError: A call failed.
    """
    with _open_session(client, turn) as session:
        generation = session.generate(
            turn.text,
            raw=turn.raw,
            max_tokens=turn.max_tokens,
            temperature=turn.temperature,
            seed=turn.seed,
            timeout_s=turn.timeout_s,
        )
        try:
            with generation, Waiting(console, "waiting for the first token") as waiting:
                for chunk in generation:
                    if not as_json and chunk.text:
                        waiting.stop()
                        out.write(chunk.text)
        finally:
            out.end_line()  # an error has a line of its own, too
    if as_json:
        out.write(result_line(session.session_id, generation.result))


def only_model(client: pagecast.Client) -> str:
    """The name of the only model served. Raises CommandError where there is none or a choice."""
    names = [model.name for model in _served(client)]
    if len(names) > 1:
        raise CommandError(
            "FIELD_REQUIRED", f"name one of the served models with --model: {', '.join(names)}"
        )
    return names[0]


def served_model(spec: str) -> str:
    """The name that a model spec is served under: a .gguf file's is its name without the suffix."""
    return PurePath(spec).stem if spec.endswith(".gguf") else spec


def result_line(session_id: str, result: pagecast.Result) -> str:
    """One line of JSON, newline included.

    `ttft_ms` is from the call to the first token's arrival here, `itl_ms` the median time between
    tokens; null where there are too few tokens. `plan_stats` are this generation's steps. `sampling`
    holds the values that took effect, the drawn seed included.
    """
    record = {
        "session_id": session_id,
        "prompt_token_ids": result.input_token_ids,
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason.name,
        "ttft_ms": result.ttft_ms,
        "itl_ms": statistics.median(result.itl_ms) if result.itl_ms else None,
        "plan_stats": _fields(result.plan_stats),
        "sampling": {
            # As it was given: a float32's 0.7 is 0.699999988 as a Python float.
            "temperature": MessageToDict(result.sampling).get("temperature"),
            "seed": result.sampling.seed if result.sampling.HasField("seed") else None,
        },
        "usage": _fields(result.usage),
        "revision": result.revision,
    }
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE).decode()


def models(client: pagecast.Client, out: Output, *, as_json: bool) -> None:
    """Write the served models to `out`: a table, or one line of JSON for each.

    Raises:
        CommandError: None is served.
        OutputError: `out` cannot be written to.
    """
    served = _served(client)
    if as_json:
        lines = (orjson.dumps(_fields(model), option=orjson.OPT_APPEND_NEWLINE) for model in served)
        out.write(b"".join(lines).decode())
        return
    out.print(models_table(served))


def models_table(served: Iterable[model_pb2.Model]) -> Table:
    """The served models for people."""
    table = Table("model", "architecture")
    for heading in ("parameters", "context tokens", "block size"):
        table.add_column(heading, justify="right")
    table.add_column("chat")
    for model in served:
        table.add_row(
            model.name,
            model.architecture,
            f"{model.num_parameters:,}",
            f"{model.max_context_tokens:,}",
            str(model.block_size),
            "yes" if model.has_chat_template else "no",
        )
    return table


def _open_session(client: pagecast.Client, turn: Turn) -> pagecast.ClientSession:
    if turn.model is None:
        return client.open_session(only_model(client), plan=turn.plan)
    name = served_model(turn.model)
    try:
        return client.open_session(name, plan=turn.plan)
    except pagecast.ModelNotFound as error:
        names = ", ".join(model.name for model in _served(client))
        raise CommandError(error.reason, f"{name!r} is not served; served: {names}") from error


def _served(client: pagecast.Client) -> Sequence[model_pb2.Model]:
    """The served models, at least one. Raises CommandError where there is none."""
    served = client.models()
    if not served:
        raise CommandError("NO_WORKER", "no worker is there")
    return served


def _fields(message: Message) -> dict[str, Any]:
    """Every field of a message of scalars, absent ones as their zero."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
