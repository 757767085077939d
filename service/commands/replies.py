"""Replies: a session, one turn in it, and its text or numbers on the output."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console

import pagecast
from service.commands.models import model_name, not_served
from service.commands.records import json_line, record
from service.terminal import Output, Waiting, tell

PLANS = {"once": pagecast.PLAN_ONCE, "replan": pagecast.REPLAN}
_LIMITS = {
    pagecast.FinishReason.MAX_TOKENS: "ended at --max-tokens",
    pagecast.FinishReason.TIME_LIMIT: "ended at --time-limit",
    pagecast.FinishReason.CONTEXT_FULL: "ended where the context is full",
}


@dataclass(frozen=True, slots=True)
class Choices:
    """What the turns of a command have in common.

    Attributes:
        model: A served name, or the path of the .gguf file that is served; None: the only one served.
        plan: None: the server's default.
        timeout_s: Deadline of each reply in seconds; None: none.
        options: Sampling and stopping.
    """

    model: str | None = None
    plan: pagecast.PagedDecodePlan | None = None
    timeout_s: float | None = None
    options: pagecast.GenerateOptions = field(default_factory=pagecast.GenerateOptions)


def generate(
    client: pagecast.Client, text: str, choices: Choices, out: Output, console: Console, *, as_json: bool
) -> None:
    """Run one turn in a new session and close it.

    Args:
        client: Where to run it.
        text: What the turn takes in.
        choices: How to run it.
        out: Takes the text as it arrives, or with `as_json` one line of JSON at the end.
        console: Shows what is being waited for, and that a limit ended it, where it is a terminal.
        as_json: See `out`.

    Raises:
        CommandError: The model is not served, or none is named and there is none or a choice.
        OutputError: `out` cannot be written to.
        pagecast.PagecastError: A call failed.
    """
    with (
        open_session(client, choices, console)[1] as session,
        session.generate(text, timeout_s=choices.timeout_s, **choices.options) as generation,
    ):
        stream(generation, None if as_json else out, console)
    if as_json:
        out.write(result_line(session.session_id, generation.result))
    else:
        tell_limit(generation.result, console)


def tell_limit(result: pagecast.Result, console: Console) -> None:
    """Say at a terminal that a limit ended a reply, which may stop in the middle of a sentence."""
    if console.is_terminal and (limit := _LIMITS.get(result.finish_reason)):
        tell(console, limit)


def open_session(
    client: pagecast.Client, choices: Choices, console: Console
) -> tuple[str, pagecast.ClientSession]:
    """Open a session; return its model's name and it. Raises CommandError that names the models there are."""
    with Waiting(console, "waiting for the server"):
        name = model_name(client, choices.model)
        try:
            return name, client.open_session(name, plan=choices.plan)
        except pagecast.ModelNotFound as error:
            raise not_served(client, name, error) from error


def stream(generation: pagecast.Generation, out: Output | None, console: Console) -> None:
    """Read a reply to its end, and write its text to `out` as it arrives, on lines of its own."""
    try:
        with Waiting(console, "waiting for the first token") as waiting:
            for chunk in generation:
                if out is not None and chunk.text:
                    waiting.stop()
                    out.write(chunk.text)
    finally:
        if out is not None:
            out.end_line()  # an error has a line of its own, too


def result_line(session_id: str, result: pagecast.Result) -> str:
    """One line of JSON, newline included.

    `ttft_ms` is from the call to the first token's arrival here, `itl_ms` the median time between
    tokens; null where there are too few tokens. `plan_stats` are this generation's steps. `sampling`
    holds the values that took effect, the drawn seed included, null for what is off. `logprobs` and
    `top_logprobs` (pairs of id and logprob) have an entry per token, null where not asked for.
    """
    return json_line(
        {
            "session_id": session_id,
            "prompt_token_ids": result.input_token_ids,
            "token_ids": result.token_ids,
            "text": result.text,
            "finish_reason": result.finish_reason.name,
            "stopped_by": result.stopped_by,
            "ttft_ms": result.ttft_ms,
            "itl_ms": _itl_ms(result),
            "logprobs": result.logprobs or None,
            "top_logprobs": result.top_logprobs or None,
            "plan_stats": record(result.plan_stats),
            "sampling": _sampling(result),
            "usage": record(result.usage),
            "revision": result.revision,
        }
    )


def timing_line(result: pagecast.Result) -> str:
    """A reply's times, tokens and end for people."""
    usage, itl_ms = result.usage, _itl_ms(result)
    parts = [
        "TTFT -" if result.ttft_ms is None else f"TTFT {result.ttft_ms:.0f} ms",
        "ITL -" if itl_ms is None else f"ITL {itl_ms:.1f} ms",
        f"{usage.output_tokens} tokens out",
        f"{usage.input_tokens} in",
        f"{usage.cached_tokens} cached",
    ]
    if usage.reprefilled_tokens:
        parts.append(f"{usage.reprefilled_tokens} computed again")
    parts.append(result.finish_reason.name)
    return ", ".join(parts)


def _itl_ms(result: pagecast.Result) -> float | None:
    return statistics.median(result.itl_ms) if result.itl_ms else None


def _sampling(result: pagecast.Result) -> dict[str, Any]:
    # Floats as they were given: a float32's 0.7 is 0.699999988 as a Python float.
    given = MessageToDict(result.sampling, preserving_proto_field_name=True)
    values = {name: given.get(name) for name in result.sampling.DESCRIPTOR.fields_by_name}
    if values["seed"] is not None:  # JSON of protobuf spells 64-bit numbers as text
        values["seed"] = result.sampling.seed
    return values
