"""Whatever a client sends is taken or refused by name, and quickly."""

import math
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as AnyMessage
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecast.v1 import generation_pb2, model_pb2, session_pb2
from service import validate
from service.errors import PagecastError
from service.ids import new_generation_id, new_session_id

SESSION = new_session_id()
Input, Messages, Message = session_pb2.Input, session_pb2.Messages, session_pb2.Message
CHECKS: dict[type[AnyMessage], Callable[[Any], None]] = {
    session_pb2.OpenSessionRequest: validate.check_open_session,
    session_pb2.GetSessionRequest: validate.check_get_session,
    session_pb2.ListSessionsRequest: validate.check_list_sessions,
    session_pb2.UpdateSessionRequest: validate.check_update_session,
    session_pb2.AppendInputRequest: validate.check_append_input,
    session_pb2.CloseSessionRequest: validate.check_close_session,
    generation_pb2.GenerateRequest: validate.check_generate,
    generation_pb2.CancelGenerationRequest: validate.check_cancel_generation,
    model_pb2.GetModelRequest: validate.check_get_model,
    model_pb2.TokenizeRequest: validate.check_tokenize,
    model_pb2.DetokenizeRequest: validate.check_detokenize,
}

# So that a check is seen to look at more than the first field.
GOOD = {
    "request_id": str(uuid.uuid4()),
    "session_id": SESSION,
    "generation_id": new_generation_id(),
    "model": "tiny",
    "disconnect_policy": 1,
}


def error_of(message: AnyMessage) -> PagecastError | None:
    try:
        CHECKS[type(message)](message)
    except PagecastError as error:
        return error
    return None


@st.composite
def messages(draw: st.DrawFn, kind: type[AnyMessage], depth: int = 0) -> AnyMessage:
    """Any message of a kind: every field absent, at an edge of its type, or anything at all."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        if field.name in GOOD and draw(st.integers(0, 3)):
            setattr(message, field.name, GOOD[field.name])
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            for _ in range(draw(st.integers(0, 3))):
                key = draw(scalars(entry["key"]))
                getattr(message, field.name)[key] = draw(scalars(entry["value"]))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = messages(field.message_type._concrete_class, depth + 1)
            if field.is_repeated:
                getattr(message, field.name).extend(draw(st.lists(inner, max_size=3)))
            else:
                getattr(message, field.name).CopyFrom(draw(inner))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(scalars(field), max_size=5)))
        else:
            setattr(message, field.name, draw(scalars(field)))
    return message


def scalars(field: Any) -> st.SearchStrategy[Any]:
    signed, unsigned = (st.sampled_from((low, -1, 0, 1, high)) for low, high in (
        (-(2**31), 2**31 - 1), (0, 2**31 - 1),
    ))  # fmt: skip
    by_type: dict[int, st.SearchStrategy[Any]] = {
        FieldDescriptor.TYPE_STRING: st.text(max_size=300)
        | st.sampled_from((SESSION, new_generation_id(), "tiny", str(uuid.uuid4()))),
        FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
        FieldDescriptor.TYPE_BOOL: st.booleans(),
        FieldDescriptor.TYPE_UINT32: unsigned.map(abs) | st.integers(0, 2**32 - 1),
        FieldDescriptor.TYPE_UINT64: unsigned.map(abs) | st.integers(0, 2**64 - 1),
        FieldDescriptor.TYPE_INT64: signed | st.integers(-(2**63), 2**63 - 1),
    }
    return by_type.get(field.type, signed | st.integers(-(2**31), 2**31 - 1))


@pytest.mark.parametrize("kind", CHECKS, ids=lambda kind: kind.__name__)
def test_any_message_is_taken_or_refused(kind: type[AnyMessage]) -> None:
    """Nothing but PagecastError, whatever a client sends, and the request is left as it was."""

    @settings(max_examples=60, deadline=500, database=None)
    @given(messages(kind))
    def check(message: AnyMessage) -> None:
        before = message.SerializeToString(deterministic=True)
        error = error_of(message)
        if error is not None:
            assert error.field
            assert error.status.name in {"INVALID_ARGUMENT", "UNIMPLEMENTED"}
        assert message.SerializeToString(deterministic=True) == before

    check()


@pytest.mark.parametrize("kind", CHECKS, ids=lambda kind: kind.__name__)
def test_any_bytes_are_malformed_or_checked(kind: type[AnyMessage]) -> None:
    @settings(max_examples=100, deadline=500, database=None)
    @given(st.binary(max_size=200))
    def check(data: bytes) -> None:
        try:
            message = kind.FromString(data)
        except DecodeError:
            return
        error = error_of(message)
        assert error is None or error.field

    check()


@pytest.mark.parametrize(
    "request_",
    [
        generation_pb2.GenerateRequest(session_id=SESSION, input=Input(text="x" * 10_000_000)),
        generation_pb2.GenerateRequest(
            session_id=SESSION, input=Input(token_ids=session_pb2.TokenIds(ids=[1] * 2_000_000))
        ),
        generation_pb2.GenerateRequest(
            session_id=SESSION, input=Input(messages=Messages(messages=[Message(role=1)] * 500_000))
        ),
        generation_pb2.GenerateRequest(
            session_id=SESSION, stopping=generation_pb2.StoppingCriteria(stop_sequences=["x" * 300] * 100_000)
        ),
        generation_pb2.GenerateRequest(
            session_id=SESSION,
            sampling=session_pb2.SamplingParams(logit_bias=dict.fromkeys(range(200_000), math.nan)),
        ),
        session_pb2.OpenSessionRequest(model="tiny", labels={str(index): "v" for index in range(100_000)}),
    ],
    ids=["text", "ids", "messages", "stops", "biases", "labels"],
)
def test_large_requests_take_no_long_time(request_: AnyMessage) -> None:
    """A check holds up every other call; what is too much is counted before it is looked at."""
    start_s = time.monotonic()
    error_of(request_)
    assert time.monotonic() - start_s < 0.2
