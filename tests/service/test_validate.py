import math
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2, model_pb2, session_pb2
from service import validate
from service.errors import PagecastError, Reason
from service.ids import new_generation_id, new_session_id
from service.validate import fields as validate_fields
from service.validate import limits

SESSION = new_session_id()
NO_UUIDS = ("", "r", "0" * 36, str(uuid.uuid4()).replace("-", ""), str(uuid.uuid4()) + "\n", "é" * 36)
BAD_DURATIONS = (
    (Duration(), Reason.FIELD_OUT_OF_RANGE),
    (Duration(seconds=-1), Reason.FIELD_OUT_OF_RANGE),
    (Duration(nanos=-1), Reason.FIELD_OUT_OF_RANGE),
    (Duration(seconds=7 * 24 * 3600, nanos=1), Reason.FIELD_OUT_OF_RANGE),
    (Duration(seconds=2**63 - 1), Reason.FIELD_OUT_OF_RANGE),
    (Duration(seconds=1, nanos=-1), Reason.FIELD_INVALID),
    (Duration(nanos=10**9), Reason.FIELD_INVALID),
    (Duration(nanos=-(2**31)), Reason.FIELD_INVALID),
)
BAD_STOPPING: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1, "min_tokens": 2}, "min_tokens"),
    ({"stop_sequences": ["x"] * 300}, "stop_sequences"),
    ({"stop_sequences": ["x", ""]}, "stop_sequences[1]"),
    ({"stop_sequences": ["é" * 128 + "x"]}, "stop_sequences[0]"),
    ({"stop_token_ids": range(65)}, "stop_token_ids"),
)
# Of `SamplingParams`: what is just inside, and what is outside.
SAMPLING: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "temperature": ((0.0, 1e-4, 100.0), (-0.1, 100.1)),
    "top_k": ((1, 2**32 - 1), (0,)),
    "top_p": ((1e-6, 1.0), (0.0, -0.1, 1.001)),
    "min_p": ((0.0, 1.0), (-0.001, 1.001)),
    "repetition_penalty": ((1e-3, 100.0), (0.0, -1.0, 100.1)),
    "presence_penalty": ((-2.0, 2.0), (-2.01, 2.01)),
    "frequency_penalty": ((-2.0, 2.0), (-2.01, 2.01)),
    "logprobs": ((0, 20), (21,)),
    "seed": ((0, 2**64 - 1), ()),
}
NO_NUMBERS = (math.nan, math.inf, -math.inf)
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
        generate(sampling=session_pb2.SamplingParams(logit_bias=dict.fromkeys(range(1024), 100.0))),
        generate(stopping=generation_pb2.StoppingCriteria(max_tokens=1)),
        generate(stopping=generation_pb2.StoppingCriteria(max_tokens=2, min_tokens=2, ignore_eos=True)),
        generate(stopping=generation_pb2.StoppingCriteria(min_tokens=9)),
        generate(stopping=generation_pb2.StoppingCriteria(stop_sequences=["é" * 128, *"abcdefghijklmno"])),
        generate(stopping=generation_pb2.StoppingCriteria(stop_token_ids=range(64))),
        generate(request_id=str(uuid.uuid4()), priority=-(2**31)),
        generate(request_id=str(uuid.uuid4()).upper()),
        generate(queue_timeout=Duration(nanos=1), time_limit=Duration(seconds=7 * 24 * 3600)),
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
        *(({"request_id": text}, Reason.FIELD_INVALID, "request_id") for text in NO_UUIDS),
        *(({"queue_timeout": value}, reason, "queue_timeout") for value, reason in BAD_DURATIONS),
        *(({"time_limit": value}, reason, "time_limit") for value, reason in BAD_DURATIONS),
        *(
            (
                {"stopping": generation_pb2.StoppingCriteria(**fields)},
                Reason.FIELD_OUT_OF_RANGE,
                f"stopping.{field}",
            )
            for fields, field in BAD_STOPPING
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
        ({"labels": {str(index): "" for index in range(65)}}, Reason.FIELD_OUT_OF_RANGE, "labels"),
        ({"labels": {"k": "é" * 129}}, Reason.FIELD_OUT_OF_RANGE, "labels"),
        ({"labels": {"k" * 257: ""}}, Reason.FIELD_OUT_OF_RANGE, "labels"),
        ({"labels": {"": "v"}}, Reason.FIELD_INVALID, "labels"),
        ({"request_id": ""}, Reason.FIELD_INVALID, "request_id"),
        ({"ttl": Duration(seconds=1)}, Reason.NOT_IMPLEMENTED, "ttl"),
        ({"initial_input": Input()}, Reason.INPUT_EMPTY, "initial_input"),
        ({"initial_input": Input(text="")}, Reason.INPUT_EMPTY, "initial_input.text"),
        (
            {"initial_input": Input(messages=Messages(messages=[Message(content="x")]))},
            Reason.FIELD_REQUIRED,
            "initial_input.messages.messages[0].role",
        ),
        ({"cache_key": "c"}, Reason.NOT_IMPLEMENTED, "cache_key"),
    ],
)
def test_bad_open_requests(fields: dict[str, Any], reason: Reason, field: str) -> None:
    assert refusal(validate.check_open_session, open_session(**fields)) == (reason, field)


@pytest.mark.parametrize("name", SAMPLING)
def test_ranges_of_sampling(name: str) -> None:
    """S23: `top_p` 0, and everything else that is outside, is refused with the field's name."""
    inside, outside = SAMPLING[name]
    is_float = session_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name].type == FieldDescriptor.TYPE_FLOAT
    for value in inside:
        params = session_pb2.SamplingParams(**{name: value})
        validate.check_generate(generate(sampling=params))
        validate.check_open_session(open_session(default_sampling=params))
    for value in (*outside, *(NO_NUMBERS if is_float else ())):
        params = session_pb2.SamplingParams(**{name: value})
        expected = (Reason.FIELD_OUT_OF_RANGE, f"sampling.{name}")
        assert refusal(validate.check_generate, generate(sampling=params)) == expected
        expected = (Reason.FIELD_OUT_OF_RANGE, f"default_sampling.{name}")
        assert refusal(validate.check_open_session, open_session(default_sampling=params)) == expected


@pytest.mark.parametrize(
    "biases", [{5: math.nan}, {5: 100.1}, {5: -math.inf}, dict.fromkeys(range(1025), 0.0)]
)
def test_bad_logit_biases(biases: dict[int, float]) -> None:
    request = generate(sampling=session_pb2.SamplingParams(logit_bias=biases))
    assert refusal(validate.check_generate, request) == (Reason.FIELD_OUT_OF_RANGE, "sampling.logit_bias")


def test_every_sampling_field_has_a_range() -> None:
    names = set(session_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert set(SAMPLING) | {"logit_bias"} == names
    assert set(limits.SAMPLING) == names - {"seed", "logit_bias"}


def test_the_worker_has_the_same_limits() -> None:
    """It takes nobody's word, so it has ranges of its own; they may not drift apart."""
    checks = pytest.importorskip("worker.checks")
    for name, allowed in limits.SAMPLING.items():
        there = checks.SAMPLING_RANGES[name]
        assert (there.low, there.is_open) == (allowed.low, allowed.is_open)
        assert there.high == (2**32 - 1 if allowed.high is None else allowed.high)
    assert set(checks.SAMPLING_RANGES) == set(limits.SAMPLING)
    bias = checks.LOGIT_BIAS_RANGE
    assert (bias.low, bias.high) == (limits.LOGIT_BIAS.low, limits.LOGIT_BIAS.high)
    for name in (
        "MAX_LOGIT_BIASES", "MAX_STOP_SEQUENCES", "MAX_STOP_SEQUENCE_BYTES", "MAX_STOP_TOKEN_IDS",
    ):  # fmt: skip
        assert getattr(checks, name) == getattr(limits, name)


def test_listed_fields_exist_and_some_do_not_work_yet() -> None:
    for message in (session_pb2.UpdateSessionRequest, session_pb2.OpenSessionRequest):
        listed = validate_fields.IMPLEMENTED[message.DESCRIPTOR.full_name]
        assert listed < set(message.DESCRIPTOR.fields_by_name)


def test_other_requests_check_their_fields() -> None:
    invalid, required = Reason.FIELD_INVALID, Reason.FIELD_REQUIRED
    outside = Reason.FIELD_OUT_OF_RANGE
    cases: list[tuple[Callable[[Any], None], Any, Reason, str]] = [
        (
            validate.check_cancel_generation,
            generation_pb2.CancelGenerationRequest(session_id=SESSION, generation_id="gen_1"),
            invalid,
            "generation_id",
        ),
        (
            validate.check_cancel_generation,
            generation_pb2.CancelGenerationRequest(request_id="1", session_id=SESSION),
            invalid,
            "request_id",
        ),
        (validate.check_get_session, session_pb2.GetSessionRequest(session_id="ses_"), invalid, "session_id"),
        (validate.check_list_sessions, session_pb2.ListSessionsRequest(page_size=0), outside, "page_size"),
        (validate.check_list_sessions, session_pb2.ListSessionsRequest(page_size=1001), outside, "page_size"),
        (
            validate.check_update_session,
            session_pb2.UpdateSessionRequest(session_id=SESSION, ttl=Duration(seconds=1)),
            Reason.NOT_IMPLEMENTED,
            "ttl",
        ),
        (
            validate.check_update_session,
            session_pb2.UpdateSessionRequest(session_id=SESSION, labels={"": "x"}),
            invalid,
            "labels",
        ),
        (
            validate.check_append_input,
            session_pb2.AppendInputRequest(session_id=SESSION),
            required,
            "input",
        ),
        (
            validate.check_append_input,
            session_pb2.AppendInputRequest(session_id=SESSION, input=Input()),
            Reason.INPUT_EMPTY,
            "input",
        ),
        (validate.check_close_session, session_pb2.CloseSessionRequest(), required, "session_id"),
        (validate.check_get_model, model_pb2.GetModelRequest(), required, "model"),
    ]
    for check, request, reason, field in cases:
        assert refusal(check, request) == (reason, field)
