"""Calls that must be refused, as a table: what is sent, and the status, reason and field that come back.

The numbers are those of docs/api.md, written once more: they share no line with the code under test.
"""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from pagecast.v1 import model_pb2, session_pb2
from tests.e2e.calls import Api, Refusal, chat, input_of

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
NAN, INF = float("nan"), float("inf")
NO_SESSION = "ses_" + "a" * 26
NO_GENERATION = "gen_" + "a" * 26
OUT, WRONG, ABSENT, EMPTY = "FIELD_OUT_OF_RANGE", "FIELD_INVALID", "FIELD_REQUIRED", "INPUT_EMPTY"
# Values just outside, and those just inside that are taken.
BAD_SAMPLING: dict[str, list[float]] = {
    "temperature": [-1e-3, 100.001, NAN, INF, -INF],
    "top_k": [0],
    "top_p": [0.0, -0.1, 1.001, NAN, INF],
    "min_p": [-1e-3, 1.001, NAN, INF],
    "repetition_penalty": [0.0, -1.0, 100.001, NAN, INF],
    "presence_penalty": [-2.001, 2.001, NAN, INF],
    "frequency_penalty": [-2.001, 2.001, NAN, -INF],
    "logprobs": [21],
}
GOOD_SAMPLING: dict[str, list[float]] = {
    "temperature": [0.0, 100.0],
    "top_k": [1, 2**32 - 1],
    "top_p": [1e-30, 1.0],
    "min_p": [0.0, 1.0],
    "repetition_penalty": [1e-30, 100.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "logprobs": [0, 20],
    "seed": [0, 2**64 - 1],
}
BAD_DURATIONS: list[tuple[dict[str, int], str]] = [
    ({}, OUT),
    ({"seconds": -1}, OUT),
    ({"nanos": -1}, OUT),
    ({"seconds": 7 * 24 * 3600, "nanos": 1}, OUT),
    ({"seconds": 2**62}, OUT),
    ({"nanos": 1_000_000_000}, WRONG),
    ({"seconds": 1, "nanos": -1}, WRONG),
]


@dataclass(frozen=True, slots=True)
class BadCall:
    """One call that must be refused.

    Attributes:
        name: What is wrong with it.
        call: Makes it, given a session whose log is not empty and a session that is empty.
        refusal: What must come back.
    """

    name: str
    call: Callable[[Api, str, str], object]
    refusal: Refusal


def bad_calls() -> list[BadCall]:
    """All of the table."""
    return [*_sampling(), *_stopping(), *_inputs(), *_enums(), *_plans(), *_ids(), *_others()]


def _bad(
    name: str,
    call: Callable[[Api, str, str], object],
    reason: str,
    field: str,
    status: grpc.StatusCode = INVALID,
) -> BadCall:
    return BadCall(name, call, Refusal(status, reason, field))


def _turn(name: str, reason: str, field: str, content: Any = "a", **options: Any) -> BadCall:
    """A turn on a session with a log."""
    return _bad(f"generate {name}", lambda api, log, _: api.turn(log, content, **options), reason, field)


def _open(name: str, reason: str, field: str, **fields: Any) -> BadCall:
    return _bad(f"open {name}", lambda api, *_: api.open(**fields), reason, field)


def _sampling() -> Iterator[BadCall]:
    rows: list[tuple[str, dict[str, Any]]] = [
        (name, {name: value}) for name, values in BAD_SAMPLING.items() for value in values
    ]
    biases: list[dict[int, float]] = [{272: 1.0}, {2**32 - 1: 1.0}, {5: 100.001}, {5: -INF}, {5: NAN}]
    biases.append(dict.fromkeys(range(1025), 0.0))
    rows += [("logit_bias", {"logit_bias": bias}) for bias in biases]
    for name, sampling in rows:
        said = str(sampling)[:40]
        yield _turn(said, OUT, f"sampling.{name}", sampling=sampling)
        yield _open(said, OUT, f"default_sampling.{name}", default_sampling=sampling)


def _stopping() -> Iterator[BadCall]:
    at = "stopping.stop_sequences"
    yield _turn("max_tokens 0", OUT, "stopping.max_tokens", max_tokens=0)
    yield _turn("min over max", OUT, "stopping.min_tokens", max_tokens=4, stop={"min_tokens": 5})
    yield _turn("300 stop sequences", OUT, at, stop={"stop_sequences": ["a"] * 300})
    yield _turn("17 stop sequences", OUT, at, stop={"stop_sequences": ["a"] * 17})
    yield _turn("empty stop sequence", OUT, f"{at}[1]", stop={"stop_sequences": ["a", ""]})
    yield _turn("long stop sequence", OUT, f"{at}[0]", stop={"stop_sequences": ["ä" * 128 + "a"]})
    yield _turn("65 stop ids", OUT, "stopping.stop_token_ids", stop={"stop_token_ids": range(65)})
    for token in (272, 2**32 - 1):
        yield _turn(f"stop id {token}", OUT, "stopping.stop_token_ids", stop={"stop_token_ids": [3, token]})
    for field in ("queue_timeout", "time_limit"):
        for value, reason in BAD_DURATIONS:
            yield _turn(f"{field} {value}", reason, field, **{field: value})


def _inputs() -> Iterator[BadCall]:
    rows: list[tuple[str, Any, str, str]] = [
        ("empty", session_pb2.Input(), EMPTY, ""),
        ("no text", "", EMPTY, ".text"),
        ("no ids", [], EMPTY, ".token_ids.ids"),
        ("no messages", chat(), EMPTY, ".messages.messages"),
        ("empty message", chat(("system", "a"), ("user", "")), EMPTY, ".messages.messages[1].content"),
        ("no role", chat(("unspecified", "a")), ABSENT, ".messages.messages[0].role"),
        ("id outside", [3, 272], OUT, ".token_ids.ids"),
        ("too many ids", [5] * 16_384, "PROMPT_TOO_LONG", ""),
        ("too long text", "a" * 200_000, "PROMPT_TOO_LONG", ""),
        ("too long message", chat(("user", "a" * 200_000)), "PROMPT_TOO_LONG", ""),
        ("4097 messages", chat(*[("user", "a")] * 4097), OUT, ".messages.messages"),
    ]
    for name, content, reason, field in rows:
        source = input_of(content)

        def tokenize(api: Api, *_: str, given: session_pb2.Input | None = source) -> object:
            return api.models.Tokenize(model_pb2.TokenizeRequest(model=api.model, input=given))

        yield _bad(
            f"generate {name}", lambda api, _, new, c=content: api.turn(new, c), reason, "input" + field
        )
        yield _bad(
            f"append {name}", lambda api, _, new, c=content: api.append(new, c), reason, "input" + field
        )
        yield _open(name, reason, "initial_input" + field, initial_input=source)
        if name != "too many ids":  # as many as the context holds are ids of a log all the same
            yield _bad(f"tokenize {name}", tokenize, reason, "input" + field)
    yield _bad("generate absent", lambda api, _, new: api.turn(new, None), ABSENT, "input")
    yield _bad("append absent", lambda api, log, _: api.append(log, None), ABSENT, "input")
    yield _bad(
        "tokenize absent",
        lambda api, *_: api.models.Tokenize(model_pb2.TokenizeRequest(model=api.model)),
        ABSENT,
        "input",
    )


def _enums() -> Iterator[BadCall]:
    for value in (3, 99, -1, 2**31 - 1):
        yield _open(f"plan {value}", WRONG, "decode_plan", decode_plan=value)
        yield _bad(
            f"update plan {value}",
            lambda api, log, _, v=value: api.update(log, decode_plan=v),
            WRONG,
            "decode_plan",
        )
        yield _turn(f"cancel_policy {value}", WRONG, "cancel_policy", cancel_policy=value)
        yield _turn(f"disconnect_policy {value}", WRONG, "disconnect_policy", disconnect_policy=value)
    message = session_pb2.Message(role=99, content="a")
    source = session_pb2.Input(messages=session_pb2.Messages(messages=[message]))
    at = "messages.messages[0].role"
    yield _bad("generate role", lambda api, _, new: api.turn(new, source), WRONG, f"input.{at}")
    yield _bad("append role", lambda api, _, new: api.append(new, source), WRONG, f"input.{at}")
    yield _open("role", WRONG, f"initial_input.{at}", initial_input=source)
    yield _bad(
        "tokenize role",
        lambda api, *_: api.models.Tokenize(model_pb2.TokenizeRequest(model=api.model, input=source)),
        WRONG,
        f"input.{at}",
    )


def _plans() -> Iterator[BadCall]:
    """One session in REPLAN more than `narrow` takes."""
    replan = session_pb2.PAGED_DECODE_PLAN_REPLAN

    def open_one_more(api: Api, *_: str) -> None:
        with api.session(model="narrow", decode_plan=replan):
            api.open(model="narrow", decode_plan=replan)

    def switch_one_more(api: Api, *_: str) -> None:
        with api.session(model="narrow", decode_plan=replan), api.session(model="narrow") as session_id:
            api.update(session_id, decode_plan=replan)

    for name, call in (("open", open_one_more), ("update", switch_one_more)):
        full = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", "decode_plan")
        yield BadCall(f"{name} one replan more", call, full)


def _ids() -> Iterator[BadCall]:
    of_session: dict[str, Callable[[Api, str], object]] = {
        "get": lambda api, name: api.get(name),
        "update": lambda api, name: api.update(name),
        "append": lambda api, name: api.append(name, "a"),
        "close": lambda api, name: api.close(name),
        "generate": lambda api, name: api.turn(name, "a"),
        "cancel": lambda api, name: api.cancel(name, NO_GENERATION),
    }
    for name, call in of_session.items():
        for value in ("nope", NO_SESSION.upper(), NO_SESSION + "a", "\n" + NO_SESSION):
            yield _bad(f"{name} {value!r}", lambda api, *_, c=call, v=value: c(api, v), WRONG, "session_id")
        yield _bad(f"{name} no session_id", lambda api, *_, c=call: c(api, ""), ABSENT, "session_id")
        yield BadCall(
            f"{name} unknown session",
            lambda api, *_, c=call: c(api, NO_SESSION),
            Refusal(NOT_FOUND, "SESSION_NOT_FOUND", "session_id"),
        )
    for value in ("", "no-uuid", str(uuid.uuid4())[:-1], f"{{{uuid.uuid4()}}}"):
        with_request_id: dict[str, Callable[[Api, str, str], object]] = {
            "open": lambda api, *_, v=value: api.open(request_id=v),
            "update": lambda api, log, _, v=value: api.update(log, request_id=v),
            "append": lambda api, log, _, v=value: api.append(log, "a", request_id=v),
            "close": lambda api, log, _, v=value: api.close(log, request_id=v),
            "generate": lambda api, log, _, v=value: api.turn(log, "a", request_id=v),
            "cancel": lambda api, log, _, v=value: api.cancel(log, NO_GENERATION, request_id=v),
        }
        for name, make in with_request_id.items():
            yield _bad(f"{name} request_id {value!r}", make, WRONG, "request_id")
    for value, reason in (("", ABSENT), ("nope", WRONG), (NO_SESSION, WRONG)):
        yield _bad(
            f"cancel {value!r}", lambda api, log, _, v=value: api.cancel(log, v), reason, "generation_id"
        )
    yield _bad(
        "cancel unknown generation",
        lambda api, log, _: api.cancel(log, NO_GENERATION),
        "GENERATION_NOT_FOUND",
        "generation_id",
        NOT_FOUND,
    )


def _others() -> Iterator[BadCall]:
    models: dict[str, Callable[[Api, str], object]] = {
        "open": lambda api, name: api.open(model=name),
        "get model": lambda api, name: api.models.GetModel(model_pb2.GetModelRequest(model=name)),
        "tokenize": lambda api, name: api.models.Tokenize(
            model_pb2.TokenizeRequest(model=name, input=session_pb2.Input(text="a"))
        ),
        "detokenize": lambda api, name: api.models.Detokenize(model_pb2.DetokenizeRequest(model=name)),
    }
    for name, call in models.items():
        yield _bad(f"{name} no model", lambda api, *_, c=call: c(api, ""), ABSENT, "model")
        yield _bad(
            f"{name} unknown model",
            lambda api, *_, c=call: c(api, "nope"),
            "MODEL_NOT_FOUND",
            "model",
            NOT_FOUND,
        )
    for ids in ([272], [5] * 16_385):
        request = model_pb2.DetokenizeRequest(model="plain", token_ids=ids)
        yield _bad(
            f"detokenize {len(ids)}", lambda api, *_, r=request: api.models.Detokenize(r), OUT, "token_ids"
        )
    for size in (0, 1001, 2**32 - 1):
        request = session_pb2.ListSessionsRequest(page_size=size)
        yield _bad(
            f"page_size {size}", lambda api, *_, r=request: api.sessions.ListSessions(r), OUT, "page_size"
        )
    for token in ("nope", "A" * 22, "é", "=" * 40):
        request = session_pb2.ListSessionsRequest(page_token=token)
        yield _bad(
            f"page_token {token}",
            lambda api, *_, r=request: api.sessions.ListSessions(r),
            WRONG,
            "page_token",
        )
    yield _open("max_context_tokens 0", OUT, "max_context_tokens", max_context_tokens=0)
    labels: list[tuple[dict[str, str], str]] = [
        ({str(number): "" for number in range(65)}, OUT),
        ({"": "a"}, WRONG),
        ({"a" * 257: ""}, OUT),
        ({"a": "ä" * 129}, OUT),
    ]
    for value, reason in labels:
        yield _open(f"labels {len(value)}", reason, "labels", labels=value)
        yield _bad("update labels", lambda api, log, _, v=value: api.update(log, labels=v), reason, "labels")
