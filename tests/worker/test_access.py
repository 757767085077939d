from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc
from worker.access import TOKEN_KEY, TokenInterceptor

TOKEN = "0123456789abcdef"


class Echo(worker_pb2_grpc.WorkerServiceServicer):
    """Answers one unary and one streaming method."""

    async def GetWorkerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return worker_pb2.GetWorkerInfoResponse(instance_id="me")

    async def StreamSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield worker_pb2.StreamStepsResponse(report=1)


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[Any]:
    server = grpc.aio.server(interceptors=[TokenInterceptor(TOKEN)])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Echo(), server)
    address = f"unix:{tmp_path}/w.sock"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel)
    await server.stop(None)


async def test_the_token_opens_every_method(stub: Any) -> None:
    metadata = ((TOKEN_KEY, TOKEN),)
    info = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), metadata=metadata)
    assert info.instance_id == "me"
    call = stub.StreamSteps(worker_pb2.StreamStepsRequest(), metadata=metadata)
    assert [report.report async for report in call] == [1]


@pytest.mark.parametrize(
    "metadata",
    [(), ((TOKEN_KEY, ""),), ((TOKEN_KEY, TOKEN[:-1]),), ((TOKEN_KEY, TOKEN + "0"),), (("token", TOKEN),)],
)
async def test_anything_else_opens_none(stub: Any, metadata: tuple[tuple[str, str], ...]) -> None:
    calls = [
        stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), metadata=metadata),
        stub.StreamSteps(worker_pb2.StreamStepsRequest(), metadata=metadata).read(),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert TOKEN not in str(caught.value)
