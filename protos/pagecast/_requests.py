"""Builds the requests of both clients. Knows no channel, no call and no answer."""

from collections.abc import Mapping
from typing import TypedDict

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
_PLANS = {
    PagedDecodePlan.PLAN_ONCE: session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE,
    PagedDecodePlan.REPLAN: session_pb2.PAGED_DECODE_PLAN_REPLAN,
}


class SessionOptions(TypedDict, total=False):
    """What `open_session` takes beside the model; an absent one leaves the server's default.

    Attributes:
        plan: How the decode step gets its plan.
        max_context_tokens: The log's budget; a longer one ends CONTEXT_FULL.
        temperature: Default of the session's turns; 0 is greedy.
        seed: Default of the session's turns.
        labels: Names and values to find the session by.
    """

    plan: PagedDecodePlan | None
    max_context_tokens: int | None
    temperature: float | None
    seed: int | None
    labels: Mapping[str, str] | None


class GenerateOptions(TypedDict, total=False):
    """What `generate` takes beside its input; an absent one takes the session's default.

    Attributes:
        raw: Append a str as it is. Otherwise it is one user message through the chat template.
        max_tokens: At least 1; absent: up to the session's context.
        temperature: 0 is greedy, at most 100.
        seed: Same log and seed: same tokens.
        expected_revision: Refuse with `RevisionMismatch` where the session has another one.
        keep_partial: A cancel, disconnect or deadline commits the input and the tokens so far.
            Otherwise the turn never happened.
        token_timing: Fill `Chunk.timings`.
    """

    raw: bool
    max_tokens: int | None
    temperature: float | None
    seed: int | None
    expected_revision: int | None
    keep_partial: bool
    token_timing: bool


def open_session(
    model: str,
    *,
    plan: PagedDecodePlan | None = None,
    max_context_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    labels: Mapping[str, str] | None = None,
) -> session_pb2.OpenSessionRequest:
    """A request from `SessionOptions`. Raises ValueError where `plan` is no PagedDecodePlan."""
    return session_pb2.OpenSessionRequest(
        model=model,
        decode_plan=_plan(plan),
        max_context_tokens=max_context_tokens,
        default_sampling=_sampling(temperature, seed),
        labels=labels,
    )


def update_session(
    session_id: str,
    plan: PagedDecodePlan | None,
    labels: Mapping[str, str] | None,
    expected_revision: int | None,
) -> session_pb2.UpdateSessionRequest:
    """A request that changes what is not None. Raises ValueError where `plan` is no PagedDecodePlan."""
    return session_pb2.UpdateSessionRequest(
        session_id=session_id, decode_plan=_plan(plan), labels=labels, expected_revision=expected_revision
    )


def cancel_generation(session_id: str, generation_id: str) -> generation_pb2.CancelGenerationRequest:
    """A request that ends a generation."""
    return generation_pb2.CancelGenerationRequest(session_id=session_id, generation_id=generation_id)


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
    """A request from `GenerateOptions`. Raises TypeError or ValueError where `turn_input` does."""
    keep = generation_pb2.CANCEL_POLICY_KEEP_PARTIAL if keep_partial else None
    stopping = None if max_tokens is None else generation_pb2.StoppingCriteria(max_tokens=max_tokens)
    return generation_pb2.GenerateRequest(
        session_id=session_id,
        expected_revision=expected_revision,
        input=turn_input(content, raw=raw),
        sampling=_sampling(temperature, seed),
        stopping=stopping,
        response=generation_pb2.ResponseOptions(token_timing=token_timing, input_token_ids=True),
        cancel_policy=keep,
    )


def turn_input(content: TurnInput, *, raw: bool) -> session_pb2.Input | None:
    """The wire's input; None stays None.

    Raises:
        TypeError: `content` is none of `TurnInput`, or `raw` without a str.
        ValueError: An empty list, whose kind cannot be told; an unknown role; an id below 0 or over 2**32-1.
    """
    if raw and not isinstance(content, str):
        raise TypeError(f"raw: only a str can be raw, not {type(content).__name__}")
    if content is None:
        return None
    if isinstance(content, str):
        if raw:
            return session_pb2.Input(text=content)
        content = (Message("user", content),)
    items = list(content)
    if not items:
        raise ValueError("input: an empty list is neither token ids nor messages")
    messages = [_message(item) for item in items if isinstance(item, Message)]
    if len(messages) == len(items):
        return session_pb2.Input(messages=session_pb2.Messages(messages=messages))
    ids = [item for item in items if isinstance(item, int)]
    if len(ids) != len(items):
        raise TypeError("input: expected a str, a list of int or a list of Message")
    if min(ids) < 0 or max(ids) >= 2**32:
        raise ValueError("input: token ids are 0 to 2**32-1")
    return session_pb2.Input(token_ids=session_pb2.TokenIds(ids=ids))


def _plan(plan: PagedDecodePlan | None) -> session_pb2.PagedDecodePlan | None:
    return None if plan is None else _PLANS[PagedDecodePlan(plan)]


def _message(message: Message) -> session_pb2.Message:
    if message.role not in _ROLES:
        raise ValueError(f"input: role {message.role!r} is none of {', '.join(_ROLES)}")
    return session_pb2.Message(role=_ROLES[message.role], content=message.content)


def _sampling(temperature: float | None, seed: int | None) -> session_pb2.SamplingParams | None:
    if temperature is None and seed is None:
        return None
    return session_pb2.SamplingParams(temperature=temperature, seed=seed)
