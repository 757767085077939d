"""Reflection over a real channel, by the bytes that any client sends."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2

from pagecast.v1 import generation_pb2, model_pb2, session_pb2
from service.reflection import V1_NAME, V1ALPHA_NAME, add_reflection

NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    add_reflection(server, (session_pb2.DESCRIPTOR, generation_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as made:
        yield made
    await server.stop(None)


async def ask(
    channel: grpc.aio.Channel, name: str, **request: str
) -> reflection_pb2.ServerReflectionResponse:
    method: Any = channel.stream_stream(
        f"/{name}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method(iter([reflection_pb2.ServerReflectionRequest(**request)]), timeout=5.0)
    (response,) = [response async for response in call]
    return response


def test_names() -> None:
    assert (V1_NAME, V1ALPHA_NAME) == NAMES


@pytest.mark.parametrize("name", NAMES)
async def test_services_are_listed(channel: grpc.aio.Channel, name: str) -> None:
    response = await ask(channel, name, list_services="")
    listed = {service.name for service in response.list_services_response.service}
    ours = {f"pagecast.v1.{service}" for service in ("SessionService", "GenerationService", "ModelService")}
    assert listed == {*ours, *NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "symbol",
    ["pagecast.v1.GenerationService", "pagecast.v1.Session", "google.rpc.ErrorInfo", *NAMES],
)
async def test_a_client_can_build_what_a_symbol_needs(
    channel: grpc.aio.Channel, name: str, symbol: str
) -> None:
    response = await ask(channel, name, file_containing_symbol=symbol)
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(data)
        for data in response.file_descriptor_response.file_descriptor_proto
    ]
    pool = descriptor_pool.DescriptorPool()
    waiting = {file.name: file for file in files}
    while waiting:
        ready = [file for file in waiting.values() if not waiting.keys() & set(file.dependency)]
        assert ready
        for file in ready:
            pool.Add(file)
            del waiting[file.name]
    assert pool.FindFileContainingSymbol(symbol).package == symbol.rpartition(".")[0]


async def test_messages_of_v1_are_all_of_v1(channel: grpc.aio.Channel) -> None:
    response = await ask(channel, NAMES[0], file_by_filename="grpc/reflection/v1/reflection.proto")
    (data,) = response.file_descriptor_response.file_descriptor_proto
    assert b"v1alpha" not in data
    assert b"ServerReflectionInfo" in data


async def test_an_unknown_symbol_is_not_found(channel: grpc.aio.Channel) -> None:
    response = await ask(channel, NAMES[0], file_containing_symbol="pagecast.v1.Nothing")
    assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


@pytest.mark.usefixtures("channel")
async def test_the_pool_of_the_process_is_left_as_it_is() -> None:
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindFileByName("grpc/reflection/v1/reflection.proto")
