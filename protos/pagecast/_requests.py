"""Builds the requests of both clients. Knows no channel, no call and no answer.

What cannot be sent raises TypeError or ValueError that names the option, before anything is.
"""

from collections.abc import Mapping, Sequence
from typing import Unpack
from uuid import UUID

from pagecast import _checks
from pagecast._inputs import turn_input
from pagecast.options import GenerateOptions, SamplingOptions, SessionOptions
from pagecast.v1 import generation_pb2, model_pb2, session_pb2
from pagecast.values import Content, PagedDecodePlan, TurnInput

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A server that sets nothing ends connections pinged more often than every 300 s; one minute
    # of reserve keeps long streams alive through idle middleboxes and off that limit.
    ("grpc.keepalive_time_ms", 360_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 0),
)

_PLANS = {
    PagedDecodePlan.PLAN_ONCE: session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE,
    PagedDecodePlan.REPLAN: session_pb2.PAGED_DECODE_PLAN_REPLAN,
}


def open_session(
    model: str,
    *,
    plan: PagedDecodePlan | None = None,
    max_context_tokens: int | None = None,
    priority: int | None = None,
    labels: Mapping[str, str] | None = None,
    initial_input: Content | None = None,
    raw: bool = False,
    request_id: str | UUID | None = None,
    **sampling: Unpack[SamplingOptions],
) -> session_pb2.OpenSessionRequest:
    """A request from `SessionOptions`."""
    _check_names("open_session", sampling, SessionOptions)
    return session_pb2.OpenSessionRequest(
        request_id=_checks.optional_request_id(request_id),
        model=_checks.text("model", model),
        decode_plan=_plan(plan),
        max_context_tokens=_checks.optional_whole("max_context_tokens", max_context_tokens, 32),
        default_sampling=sampling_params(**sampling),
        initial_input=turn_input(initial_input, raw=raw, name="initial_input"),
        priority=_checks.optional_signed("priority", priority, 32),
        labels=_checks.labels("labels", labels),
    )


def get_session(session_id: str) -> session_pb2.GetSessionRequest:
    """A request that reads a session."""
    return session_pb2.GetSessionRequest(session_id=_checks.text("session_id", session_id))


def list_sessions(page_size: int | None) -> session_pb2.ListSessionsRequest:
    """A request for the first page of sessions."""
    return session_pb2.ListSessionsRequest(page_size=_checks.optional_whole("page_size", page_size, 32))


def close_session(
    session_id: str, *, request_id: str | UUID | None = None
) -> session_pb2.CloseSessionRequest:
    """A request that ends a session."""
    return session_pb2.CloseSessionRequest(
        request_id=_checks.optional_request_id(request_id), session_id=_checks.text("session_id", session_id)
    )


def update_session(
    session_id: str,
    *,
    plan: PagedDecodePlan | None = None,
    priority: int | None = None,
    labels: Mapping[str, str] | None = None,
    expected_revision: int | None = None,
    request_id: str | UUID | None = None,
) -> session_pb2.UpdateSessionRequest:
    """A request that changes what is not None."""
    return session_pb2.UpdateSessionRequest(
        request_id=_checks.optional_request_id(request_id),
        session_id=_checks.text("session_id", session_id),
        expected_revision=_checks.optional_whole("expected_revision", expected_revision, 64),
        decode_plan=_plan(plan),
        priority=_checks.optional_signed("priority", priority, 32),
        labels=_checks.labels("labels", labels),
    )


def append_input(
    session_id: str,
    content: Content,
    *,
    raw: bool = False,
    expected_revision: int | None = None,
    request_id: str | UUID | None = None,
) -> session_pb2.AppendInputRequest:
    """A request that appends to a session's log."""
    return session_pb2.AppendInputRequest(
        request_id=_checks.optional_request_id(request_id),
        session_id=_checks.text("session_id", session_id),
        expected_revision=_checks.optional_whole("expected_revision", expected_revision, 64),
        input=turn_input(content, raw=raw, may_be_none=False),
    )


def cancel_generation(
    session_id: str, generation_id: str, *, request_id: str | UUID | None = None
) -> generation_pb2.CancelGenerationRequest:
    """A request that ends a generation."""
    return generation_pb2.CancelGenerationRequest(
        request_id=_checks.optional_request_id(request_id),
        session_id=_checks.text("session_id", session_id),
        generation_id=_checks.text("generation_id", generation_id),
    )


def tokenize(model: str, content: Content, *, raw: bool = False) -> model_pb2.TokenizeRequest:
    """A request for the ids of an input."""
    return model_pb2.TokenizeRequest(
        model=_checks.text("model", model), input=turn_input(content, raw=raw, may_be_none=False)
    )


def detokenize(model: str, token_ids: Sequence[int]) -> model_pb2.DetokenizeRequest:
    """A request for the text of ids."""
    return model_pb2.DetokenizeRequest(
        model=_checks.text("model", model), token_ids=_checks.wholes("token_ids", token_ids, 32)
    )


def generate(
    session_id: str,
    content: TurnInput,
    *,
    raw: bool = False,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    queue_timeout_s: float | None = None,
    time_limit_s: float | None = None,
    priority: int | None = None,
    expected_revision: int | None = None,
    request_id: str | UUID | None = None,
    keep_partial: bool = False,
    token_timing: bool = False,
    **sampling: Unpack[SamplingOptions],
) -> generation_pb2.GenerateRequest:
    """A request from `GenerateOptions`."""
    _check_names("generate", sampling, GenerateOptions)
    keep = _checks.flag("keep_partial", keep_partial)
    stopping = generation_pb2.StoppingCriteria(
        max_tokens=_checks.optional_whole("max_tokens", max_tokens, 32),
        min_tokens=_checks.optional_whole("min_tokens", min_tokens, 32),
        stop_sequences=_checks.texts("stop", (stop,) if isinstance(stop, str) else stop),
        stop_token_ids=_checks.wholes("stop_token_ids", stop_token_ids, 32),
        ignore_eos=_checks.flag("ignore_eos", ignore_eos),
    )
    return generation_pb2.GenerateRequest(
        request_id=_checks.optional_request_id(request_id),
        session_id=_checks.text("session_id", session_id),
        expected_revision=_checks.optional_whole("expected_revision", expected_revision, 64),
        input=turn_input(content, raw=raw),
        sampling=sampling_params(**sampling),
        stopping=stopping if stopping.ListFields() else None,
        response=generation_pb2.ResponseOptions(
            token_timing=_checks.flag("token_timing", token_timing), input_token_ids=True
        ),
        priority=_checks.optional_signed("priority", priority, 32),
        queue_timeout=_checks.optional_duration("queue_timeout_s", queue_timeout_s),
        time_limit=_checks.optional_duration("time_limit_s", time_limit_s),
        cancel_policy=generation_pb2.CANCEL_POLICY_KEEP_PARTIAL if keep else None,
    )


def sampling_params(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    logprobs: int | None = None,
) -> session_pb2.SamplingParams | None:
    """The wire's parameters from `SamplingOptions`; None where none is set."""
    params = session_pb2.SamplingParams(
        temperature=_checks.optional_real("temperature", temperature),
        top_k=_checks.optional_whole("top_k", top_k, 32),
        top_p=_checks.optional_real("top_p", top_p),
        min_p=_checks.optional_real("min_p", min_p),
        seed=_checks.optional_whole("seed", seed, 64),
        repetition_penalty=_checks.optional_real("repetition_penalty", repetition_penalty),
        presence_penalty=_checks.optional_real("presence_penalty", presence_penalty),
        frequency_penalty=_checks.optional_real("frequency_penalty", frequency_penalty),
        logit_bias=_checks.biases("logit_bias", logit_bias),
        logprobs=_checks.optional_whole("logprobs", logprobs, 32),
    )
    return params if params.ListFields() else None


def _check_names(method: str, given: Mapping[str, object], options: type) -> None:
    """Refuse what is left of a method's options and is none of sampling's either."""
    known = (*options.__annotations__, "timeout_s")
    _checks.options(method, [name for name in given if name not in SamplingOptions.__annotations__], known)


def _plan(plan: PagedDecodePlan | None) -> session_pb2.PagedDecodePlan | None:
    if plan is None:
        return None
    try:
        return _PLANS[PagedDecodePlan(plan)]
    except ValueError as error:
        raise ValueError(f"plan: expected a PagedDecodePlan, got {plan!r}") from error
