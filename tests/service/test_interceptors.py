from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from pagecast.v1 import generation_pb2, model_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from service.errors import PagecastError, Reason
from tests.service.conftest import Gateway, failure

NOT_A_MESSAGE = b"\xff\xff\xff"
BAD_UTF8 = b"\x0a\x02\xff\xfe"  # field 1, a string of two bytes that are no UTF-8


async def test_malformed_bytes_on_a_request_stream(gateway: Gateway) -> None:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    call: Any = gateway.channel.stream_stream(method)(iter([NOT_A_MESSAGE]))
    status, reason, _, _ = await failure(call.read())
    assert (status, reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")


SERVICES = (session_pb2, generation_pb2, model_pb2)
METHODS = [
    method
    for module in SERVICES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def call_of(gateway: Gateway, method: Any, data: bytes) -> Any:
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.server_streaming:
        return gateway.channel.unary_stream(path)(data).read()
    return gateway.channel.unary_unary(path)(data)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_every_rpc_refuses_malformed_bytes_with_a_reason(gateway: Gateway, method: Any) -> None:
    for data in (NOT_A_MESSAGE, BAD_UTF8):
        if data == BAD_UTF8 and not takes_a_string_first(method):
            continue
        status, reason, _, whole = await failure(call_of(gateway, method, data))
        assert (status, reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")
        assert b"DecodeError" not in whole.SerializeToString()
        assert whole.ByteSize() < 1024


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_every_rpc_refuses_an_empty_request_with_a_reason(gateway: Gateway, method: Any) -> None:
    if method.name in {"ListModels", "ListSessions"}:
        await call_of(gateway, method, b"")  # they need nothing
        return
    status, reason, metadata, whole = await failure(call_of(gateway, method, b""))
    assert (status, reason) in {("INVALID_ARGUMENT", "FIELD_REQUIRED"), ("UNIMPLEMENTED", "NOT_IMPLEMENTED")}
    assert set(metadata) == {"field" if reason == "FIELD_REQUIRED" else "rpc"}
    assert whole.ByteSize() < 1024


@pytest.mark.parametrize("reason", list(Reason))
async def test_every_reason_reaches_the_client_of_a_call_and_of_a_stream(
    gateway: Gateway, reason: Reason
) -> None:
    refusal = worker_pb2.Refusal(
        reason=reason, field="f" * 2000, message="é" * 3000, metadata={"k" * 300: "v" * 3000, "session": "s"}
    )
    session_id = await gateway.open()
    gateway.worker.refusals["UpdateSession"] = refusal
    gateway.worker.refusals["Submit"] = refusal
    update = session_pb2.UpdateSessionRequest(session_id=session_id)
    for call in (gateway.sessions.UpdateSession(update), gateway.generate(session_id).read()):
        status, told, _, whole = await failure(call)
        assert (status, told) == (PagecastError(reason, "").status.name, reason)
        assert whole.ByteSize() < 1024
    got = await gateway.sessions.GetSession(session_pb2.GetSessionRequest(session_id=session_id))
    # Of a turn WORKER_LOST means that nobody knows how it ended.
    state = "FAILED" if reason is Reason.WORKER_LOST else "ACTIVE"
    assert session_pb2.SessionState.Name(got.session.state) == f"SESSION_STATE_{state}"


async def test_a_bug_is_internal_under_an_id_and_tells_nothing_else(gateway: Gateway) -> None:
    gateway.router.find = None  # type: ignore[assignment,method-assign]
    session_id = await gateway.open()
    for call in (
        gateway.sessions.GetSession(session_pb2.GetSessionRequest(session_id=session_id)),
        gateway.generate(session_id).read(),
    ):
        status, reason, metadata, whole = await failure(call)
        assert (status, reason, set(metadata)) == ("INTERNAL", "INTERNAL", {"error_id"})
        assert b"NoneType" not in whole.SerializeToString()
    assert len(await gateway.log_lines("internal_error", 2)) == 2


def takes_a_string_first(method: Any) -> bool:
    first = method.input_type.fields_by_number.get(1)
    return first is not None and first.type == FieldDescriptor.TYPE_STRING


async def test_an_unknown_method_is_unimplemented(gateway: Gateway) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.channel.unary_unary("/pagecast.v1.SessionService/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
