"""Builds the requests of both clients. Knows no channel, no call and no answer.

What cannot be sent raises TypeError or ValueError that names the option, before anything is.
"""

from collections.abc import Mapping, Sequence

from pagecast import _checks
from pagecast.v1 import generation_pb2, session_pb2
from pagecast.values import Message, PagedDecodePlan, TurnInput

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A server that sets nothing ends connections pinged more often than every 300 s; one minute
    # of reserve keeps long streams alive through idle middleboxes and off that limit.
    ("grpc.keepalive_time_ms", 360_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 0),
)

_ROLES = {
    "system": session_pb2.ROLE_SYSTEM,
    "user": session_pb2.ROLE_USER,
    "assistant": session_pb2.ROLE_ASSISTANT,
}
_INPUT = "a str, a sequence of int, a sequence of Message, or None"
_PLANS = {
    PagedDecodePlan.PLAN_ONCE: session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE,
    PagedDecodePlan.REPLAN: session_pb2.PAGED_DECODE_PLAN_REPLAN,
}


def open_session(
    model: str,
    *,
    plan: PagedDecodePlan | None = None,
    max_context_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    labels: Mapping[str, str] | None = None,
) -> session_pb2.OpenSessionRequest:
    """A request from `SessionOptions`."""
    return session_pb2.OpenSessionRequest(
        model=_checks.text("model", model),
        decode_plan=_plan(plan),
        max_context_tokens=_checks.optional_whole("max_context_tokens", max_context_tokens, 32),
        default_sampling=_sampling(temperature, seed),
        labels=_checks.labels("labels", labels),
    )


def get_session(session_id: str) -> session_pb2.GetSessionRequest:
    """A request that reads a session."""
    return session_pb2.GetSessionRequest(session_id=_checks.text("session_id", session_id))


def close_session(session_id: str) -> session_pb2.CloseSessionRequest:
    """A request that ends a session."""
    return session_pb2.CloseSessionRequest(session_id=_checks.text("session_id", session_id))


def update_session(
    session_id: str,
    plan: PagedDecodePlan | None,
    labels: Mapping[str, str] | None,
    expected_revision: int | None,
) -> session_pb2.UpdateSessionRequest:
    """A request that changes what is not None."""
    return session_pb2.UpdateSessionRequest(
        session_id=_checks.text("session_id", session_id),
        decode_plan=_plan(plan),
        labels=_checks.labels("labels", labels),
        expected_revision=_checks.optional_whole("expected_revision", expected_revision, 64),
    )


def cancel_generation(session_id: str, generation_id: str) -> generation_pb2.CancelGenerationRequest:
    """A request that ends a generation."""
    return generation_pb2.CancelGenerationRequest(
        session_id=_checks.text("session_id", session_id),
        generation_id=_checks.text("generation_id", generation_id),
    )


def generate(
    session_id: str,
    content: TurnInput,
    *,
    raw: bool = False,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    expected_revision: int | None = None,
    keep_partial: bool = False,
    token_timing: bool = False,
) -> generation_pb2.GenerateRequest:
    """A request from `GenerateOptions`."""
    keep = _checks.flag("keep_partial", keep_partial)
    limit = _checks.optional_whole("max_tokens", max_tokens, 32)
    return generation_pb2.GenerateRequest(
        session_id=_checks.text("session_id", session_id),
        expected_revision=_checks.optional_whole("expected_revision", expected_revision, 64),
        input=turn_input(content, raw=_checks.flag("raw", raw)),
        sampling=_sampling(temperature, seed),
        stopping=None if limit is None else generation_pb2.StoppingCriteria(max_tokens=limit),
        response=generation_pb2.ResponseOptions(
            token_timing=_checks.flag("token_timing", token_timing), input_token_ids=True
        ),
        cancel_policy=generation_pb2.CANCEL_POLICY_KEEP_PARTIAL if keep else None,
    )


def turn_input(content: TurnInput, *, raw: bool) -> session_pb2.Input | None:
    """The wire's input; None stays None.

    Raises:
        TypeError: `content` is none of `TurnInput`, or `raw` without a str.
        ValueError: An empty sequence, whose kind cannot be told; an unknown role; an id that is not
            from 0 to 2**32-1; text that UTF-8 cannot spell.
    """
    if raw and not isinstance(content, str):
        raise TypeError(f"raw: only a str can be raw, not {type(content).__name__}")
    if content is None:
        return None
    if isinstance(content, str):
        if raw:
            return session_pb2.Input(text=_checks.text("input", content))
        content = (Message("user", content),)
    # Bytes are sequences of int, and never meant as token ids; sets and generators have no order or length.
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray | memoryview):
        raise TypeError(f"input: expected {_INPUT}, got {type(content).__name__}")
    if not content:
        raise ValueError("input: an empty sequence is neither token ids nor messages")
    if isinstance(content[0], Message):
        messages = [_message(f"input[{position}]", item) for position, item in enumerate(content)]
        return session_pb2.Input(messages=session_pb2.Messages(messages=messages))
    ids = [_token_id(position, item) for position, item in enumerate(content)]
    return session_pb2.Input(token_ids=session_pb2.TokenIds(ids=ids))


def _token_id(position: int, item: object) -> int:
    if type(item) is int and 0 <= item < 1 << 32:  # as almost all are, and there may be many
        return item
    try:
        return _checks.whole(f"input[{position}]", item, 32)
    except TypeError as error:
        raise TypeError(f"input: expected {_INPUT}; item {position} is {type(item).__name__}") from error


def _message(name: str, message: object) -> session_pb2.Message:
    if not isinstance(message, Message):
        raise TypeError(f"input: expected {_INPUT}; {name} is {type(message).__name__}")
    role = _checks.text(f"{name}.role", message.role)
    if role not in _ROLES:
        raise ValueError(f"{name}.role: {role!r} is none of {', '.join(_ROLES)}")
    return session_pb2.Message(role=_ROLES[role], content=_checks.text(f"{name}.content", message.content))


def _plan(plan: PagedDecodePlan | None) -> session_pb2.PagedDecodePlan | None:
    if plan is None:
        return None
    try:
        return _PLANS[PagedDecodePlan(plan)]
    except ValueError as error:
        raise ValueError(f"plan: expected a PagedDecodePlan, got {plan!r}") from error


def _sampling(temperature: float | None, seed: int | None) -> session_pb2.SamplingParams | None:
    if temperature is None and seed is None:
        return None
    return session_pb2.SamplingParams(
        temperature=_checks.optional_real("temperature", temperature),
        seed=_checks.optional_whole("seed", seed, 64),
    )
