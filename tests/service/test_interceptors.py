from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from service.server import SERVICES
from tests.service.conftest import Gateway, failure

NOT_A_MESSAGE = b"\xff\xff\xff"
BAD_UTF8 = b"\x0a\x02\xff\xfe"  # field 1, a string of two bytes that are no UTF-8


@pytest.mark.parametrize("data", [NOT_A_MESSAGE, BAD_UTF8])
async def test_malformed_bytes_are_an_invalid_argument(gateway: Gateway, data: bytes) -> None:
    unary = gateway.channel.unary_unary("/pagecast.v1.SessionService/GetSession")
    stream = gateway.channel.unary_stream("/pagecast.v1.GenerationService/Generate")
    for call in (unary(data), stream(data).read()):
        status, reason, _, whole = await failure(call)
        assert (status, reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")
        assert b"DecodeError" not in whole.SerializeToString()


async def test_malformed_bytes_on_a_request_stream(gateway: Gateway) -> None:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    call: Any = gateway.channel.stream_stream(method)(iter([NOT_A_MESSAGE]))
    status, reason, _, _ = await failure(call.read())
    assert (status, reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")


async def test_health_and_reflection_name_every_service(gateway: Gateway) -> None:
    health: Any = health_pb2_grpc.HealthStub(gateway.channel)
    for name in ("", *SERVICES):
        response = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()

    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(gateway.channel)
    call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    assert set(SERVICES) < listed


async def test_an_unknown_method_is_unimplemented(gateway: Gateway) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.channel.unary_unary("/pagecast.v1.SessionService/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
