import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2, model_pb2, session_pb2
from service import validate
from service.errors import PagecastError, Reason
from service.ids import new_generation_id, new_session_id

SESSION = new_session_id()
Input, Messages, Message = session_pb2.Input, session_pb2.Messages, session_pb2.Message


def refusal(check: Callable[[Any], None], request: Any) -> tuple[Reason, str]:
    before = request.SerializeToString(deterministic=True)
    with pytest.raises(PagecastError) as caught:
        check(request)
    assert request.SerializeToString(deterministic=True) == before
    return caught.value.reason, caught.value.field


def generate(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(**{"session_id": SESSION, **fields})


def open_session(**fields: Any) -> session_pb2.OpenSessionRequest:
    return session_pb2.OpenSessionRequest(**{"model": "m", **fields})


@pytest.mark.parametrize(
    "request_",
    [
        generate(),
        generate(input=Input(text="x")),
        generate(input=Input(token_ids=session_pb2.TokenIds(ids=[0]))),
        generate(input=Input(messages=Messages(messages=[Message(role=session_pb2.ROLE_SYSTEM)]))),
        generate(sampling=session_pb2.SamplingParams(temperature=0.0, seed=0)),
        generate(sampling=session_pb2.SamplingParams(temperature=100.0, seed=2**64 - 1)),
        generate(stopping=generation_pb2.StoppingCriteria(max_tokens=1)),
        generate(expected_revision=0, disconnect_policy=generation_pb2.DISCONNECT_POLICY_CANCEL),
        generate(cancel_policy=generation_pb2.CANCEL_POLICY_KEEP_PARTIAL),
        generate(response=generation_pb2.ResponseOptions(token_timing=True, input_token_ids=True)),
    ],
)
def test_good_generate_requests(request_: generation_pb2.GenerateRequest) -> None:
    validate.check_generate(request_)


def test_good_open_request() -> None:
    labels = {f"{index:0256d}": "v" * 256 for index in range(64)}
    validate.check_open_session(open_session(max_context_tokens=1, labels=labels, decode_plan=2))


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"session_id": ""}, Reason.FIELD_REQUIRED, "session_id"),
        ({"session_id": SESSION + "\n"}, Reason.FIELD_INVALID, "session_id"),
        ({"session_id": SESSION.upper()}, Reason.FIELD_INVALID, "session_id"),
        ({"session_id": new_generation_id()}, Reason.FIELD_INVALID, "session_id"),
        ({"input": Input()}, Reason.INPUT_EMPTY, "input"),
        ({"input": Input(text="")}, Reason.INPUT_EMPTY, "input.text"),
        ({"input": Input(token_ids=session_pb2.TokenIds())}, Reason.INPUT_EMPTY, "input.token_ids.ids"),
        ({"input": Input(messages=Messages())}, Reason.INPUT_EMPTY, "input.messages.messages"),
        (
            {"input": Input(messages=Messages(messages=[Message(role=session_pb2.ROLE_USER)]))},
            Reason.INPUT_EMPTY,
            "input.messages.messages[0].content",
        ),
        (
            {"input": Input(messages=Messages(messages=[Message(role=1), Message(content="x")]))},
            Reason.FIELD_REQUIRED,
            "input.messages.messages[1].role",
        ),
        (
            {"input": Input(messages=Messages(messages=[Message(role=1), Message(role=9)]))},  # type: ignore[arg-type]
            Reason.FIELD_INVALID,
            "input.messages.messages[1].role",
        ),
        ({"cancel_policy": 7}, Reason.FIELD_INVALID, "cancel_policy"),
        ({"disconnect_policy": -1}, Reason.FIELD_INVALID, "disconnect_policy"),
        (
            {"disconnect_policy": generation_pb2.DISCONNECT_POLICY_CONTINUE},
            Reason.NOT_IMPLEMENTED,
            "disconnect_policy",
        ),
        (
            {"stopping": generation_pb2.StoppingCriteria(max_tokens=0)},
            Reason.FIELD_OUT_OF_RANGE,
            "stopping.max_tokens",
        ),
        *(
            (
                {"sampling": session_pb2.SamplingParams(temperature=value)},
                Reason.FIELD_OUT_OF_RANGE,
                "sampling.temperature",
            )
            for value in (math.nan, math.inf, -math.inf, -0.1, 100.1)
        ),
        ({"request_id": "r"}, Reason.NOT_IMPLEMENTED, "request_id"),
        ({"request_id": ""}, Reason.NOT_IMPLEMENTED, "request_id"),
        ({"priority": 0}, Reason.NOT_IMPLEMENTED, "priority"),
        ({"queue_timeout": Duration()}, Reason.NOT_IMPLEMENTED, "queue_timeout"),
        ({"time_limit": Duration(seconds=1)}, Reason.NOT_IMPLEMENTED, "time_limit"),
        ({"sampling": session_pb2.SamplingParams(top_k=1)}, Reason.NOT_IMPLEMENTED, "sampling.top_k"),
        (
            {"sampling": session_pb2.SamplingParams(logit_bias={1: 2.0})},
            Reason.NOT_IMPLEMENTED,
            "sampling.logit_bias",
        ),
        (
            {"stopping": generation_pb2.StoppingCriteria(stop_sequences=["x"])},
            Reason.NOT_IMPLEMENTED,
            "stopping.stop_sequences",
        ),
        (
            {"stopping": generation_pb2.StoppingCriteria(ignore_eos=True)},
            Reason.NOT_IMPLEMENTED,
            "stopping.ignore_eos",
        ),
    ],
)
def test_bad_generate_requests(fields: dict[str, Any], reason: Reason, field: str) -> None:
    assert refusal(validate.check_generate, generate(**fields)) == (reason, field)


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"model": ""}, Reason.FIELD_REQUIRED, "model"),
        ({"decode_plan": 3}, Reason.FIELD_INVALID, "decode_plan"),
        ({"max_context_tokens": 0}, Reason.FIELD_OUT_OF_RANGE, "max_context_tokens"),
        (
            {"default_sampling": session_pb2.SamplingParams(temperature=math.nan)},
            Reason.FIELD_OUT_OF_RANGE,
            "default_sampling.temperature",
        ),
        (
            {"default_sampling": session_pb2.SamplingParams(top_p=1.0)},
            Reason.NOT_IMPLEMENTED,
            "default_sampling.top_p",
        ),
        ({"labels": {str(index): "" for index in range(65)}}, Reason.FIELD_OUT_OF_RANGE, "labels"),
        ({"labels": {"k": "é" * 129}}, Reason.FIELD_OUT_OF_RANGE, "labels"),
        ({"labels": {"k" * 257: ""}}, Reason.FIELD_OUT_OF_RANGE, "labels"),
        ({"labels": {"": "v"}}, Reason.FIELD_INVALID, "labels"),
        ({"ttl": Duration(seconds=1)}, Reason.NOT_IMPLEMENTED, "ttl"),
        ({"initial_input": Input(text="x")}, Reason.NOT_IMPLEMENTED, "initial_input"),
        ({"cache_key": "c"}, Reason.NOT_IMPLEMENTED, "cache_key"),
    ],
)
def test_bad_open_requests(fields: dict[str, Any], reason: Reason, field: str) -> None:
    assert refusal(validate.check_open_session, open_session(**fields)) == (reason, field)


def test_every_field_of_every_request_is_implemented_or_refused() -> None:
    """No field of a request can be ignored: each is in the table, or the table's absence means all."""
    for message in (generation_pb2.GenerateRequest, session_pb2.OpenSessionRequest):
        listed = validate._IMPLEMENTED[message.DESCRIPTOR.full_name]
        assert listed < set(message.DESCRIPTOR.fields_by_name)


def test_other_requests_check_their_ids() -> None:
    cancel = generation_pb2.CancelGenerationRequest(session_id=SESSION, generation_id="gen_1")
    assert refusal(validate.check_cancel_generation, cancel) == (Reason.FIELD_INVALID, "generation_id")
    get = session_pb2.GetSessionRequest(session_id="ses_")
    assert refusal(validate.check_get_session, get) == (Reason.FIELD_INVALID, "session_id")
    update = session_pb2.UpdateSessionRequest(session_id=SESSION, priority=1)
    assert refusal(validate.check_update_session, update) == (Reason.NOT_IMPLEMENTED, "priority")
    close = session_pb2.CloseSessionRequest()
    assert refusal(validate.check_close_session, close) == (Reason.FIELD_REQUIRED, "session_id")
    model = model_pb2.GetModelRequest()
    assert refusal(validate.check_get_model, model) == (Reason.FIELD_REQUIRED, "model")
