"""What the client commands do: talk to a server, write to the given streams.

Knows the client and what a terminal shows; knows no flags, no exit codes and nothing of the server's inside.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

import orjson
from rich.console import Console
from rich.table import Table

import pagecast
from pagecast.v1 import model_pb2
from service.terminal import Waiting


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
        model: None: the only one served.
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


def generate(client: pagecast.Client, turn: Turn, out: IO[str], console: Console, *, as_json: bool) -> None:
    """Run one turn in a new session and close it.

    Args:
        client: Where to run it.
        turn: What to run.
        out: Takes the text as it arrives, or with `as_json` one line of JSON at the end.
        console: Shows that the first token is being waited for, where it is a terminal.
        as_json: See `out`.

    Raises:
        CommandError: No model is named, and there is none or a choice.
        pagecast.PagecastError: A call failed.
    """
    model = turn.model or only_model(client)
    with client.open_session(model, plan=turn.plan) as session:
        generation = session.generate(
            turn.text,
            raw=turn.raw,
            max_tokens=turn.max_tokens,
            temperature=turn.temperature,
            seed=turn.seed,
            timeout_s=turn.timeout_s,
        )
        shown = "\n"
        try:
            with generation, Waiting(console, "waiting for the first token") as waiting:
                for chunk in generation:
                    if not as_json and chunk.text:
                        waiting.stop()
                        shown = chunk.text
                        out.write(shown)
                        out.flush()
        finally:
            if not shown.endswith("\n"):  # an error has a line of its own, too
                out.write("\n")
    if as_json:
        out.write(result_line(session.session_id, generation.result))


def only_model(client: pagecast.Client) -> str:
    """The name of the only model served. Raises CommandError where there is none or a choice."""
    names = [model.name for model in client.models()]
    if not names:
        raise CommandError("MODEL_NOT_FOUND", "the server serves no model")
    if len(names) > 1:
        raise CommandError(
            "FIELD_REQUIRED", f"name one of the served models with --model: {', '.join(names)}"
        )
    return names[0]


def result_line(session_id: str, result: pagecast.Result) -> str:
    """One line of JSON, newline included.

    `ttft_ms` is from the call to the first token's arrival here, `itl_ms` the median time between
    tokens; null where there are too few tokens. `plan_stats` are this generation's steps.
    """
    stats = result.plan_stats
    record = {
        "session_id": session_id,
        "prompt_token_ids": result.input_token_ids,
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason.name,
        "ttft_ms": result.ttft_ms,
        "itl_ms": statistics.median(result.itl_ms) if result.itl_ms else None,
        "plan_stats": {
            "builds": stats.builds,
            "reuses": stats.reuses,
            "replans": stats.replans,
            "launches_per_step": stats.launches_per_step,
            "host_bytes_per_step": stats.host_bytes_per_step,
        },
    }
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE).decode()


def models(client: pagecast.Client, out: IO[str], *, as_json: bool) -> None:
    """Write the served models to `out`: a table, or one line of JSON for each."""
    served = client.models()
    if not as_json:
        Console(file=out).print(models_table(served))
        return
    for model in served:
        record = {field.name: getattr(model, field.name) for field in model_pb2.Model.DESCRIPTOR.fields}
        out.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE).decode())


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
