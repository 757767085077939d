import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection

from pagecast._log import LogWriter, open_log
from pagecast.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from service.generation import GenerationServicer
from service.interceptors import ErrorInterceptor
from service.models import ModelServicer
from service.pool.link import WorkerLink
from service.replays import Replays
from service.router import Router
from service.sessions import SessionServicer
from service.turns import Turns
from tests.service.fake_worker import FakeWorker


@dataclass
class Gateway:
    """A gateway in this process, its fake workers, and a client's channel to it."""

    workers: list[FakeWorker]
    links: list[WorkerLink]
    channel: grpc.aio.Channel
    stream: io.BytesIO
    router: Router[WorkerLink]
    turns: Turns
    replays: Replays
    sessions: Any = field(init=False)
    generations: Any = field(init=False)
    models: Any = field(init=False)

    def __post_init__(self) -> None:
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self.generations = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    async def open(self) -> str:
        response = await self.sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))
        return response.session.session_id

    def generate(self, session_id: str, **kwargs: Any) -> Any:
        request = generation_pb2.GenerateRequest(
            session_id=session_id, input=session_pb2.Input(text="hello there")
        )
        return self.generations.Generate(request, **kwargs)

    async def submitted(self, count: int = 1) -> str:
        """Wait for the count-th Submit; its generation id."""
        await until(lambda: len(self.worker.submits) >= count)
        return list(self.worker.submits)[count - 1]

    async def log_lines(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        def lines() -> list[dict[str, Any]]:
            found = [orjson.loads(line) for line in self.stream.getvalue().splitlines()]
            return [line for line in found if line["event"] == event]

        await until(lambda: len(lines()) >= count)
        return lines()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.005)


async def failure(call: Awaitable[Any]) -> tuple[str, str, dict[str, str], status_pb2.Status]:
    """Await a call that must fail: its status name, reason, metadata, and whole status."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailing = dict(caught.value.trailing_metadata())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "pagecast"
    return caught.value.code().name, info.reason, dict(info.metadata), status


async def drain(call: Any) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in call]


MakeGateway = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def make_gateway(tmp_path: Path) -> AsyncIterator[MakeGateway]:
    undo: list[Callable[[], Awaitable[Any]]] = []

    async def make(num_workers: int = 1, *, client_options: tuple[tuple[str, int], ...] = ()) -> Gateway:
        stream = io.BytesIO()
        writer = LogWriter(stream)
        log = open_log(writer, "debug")
        workers = [FakeWorker(tmp_path) for _ in range(num_workers)]
        for worker in workers:
            await worker.start()
            undo.append(worker.die)
        links = [
            await WorkerLink.connect(
                worker.address, version="0.1.0", exit_code=lambda: None, timeout_s=5.0, log=log
            )
            for worker in workers
        ]
        undo.extend(link.close for link in links)
        router = Router(links)
        server = grpc.aio.server(interceptors=[ErrorInterceptor(log)])
        turns, replays = Turns(), Replays()
        session_pb2_grpc.add_SessionServiceServicer_to_server(SessionServicer(router, turns, replays), server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(router, turns, replays, log), server
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(router), server)
        reflection.enable_server_reflection((reflection.SERVICE_NAME,), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        undo.append(lambda: server.stop(None))
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options)
        undo.append(channel.close)
        return Gateway(workers, links, channel, stream, router, turns, replays)

    yield make
    for step in reversed(undo):
        await step()


@pytest.fixture
async def gateway(make_gateway: MakeGateway) -> Gateway:
    return await make_gateway()


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[FakeWorker]:
    """A worker that serves; ended also where a test fails, since gRPC crashes on a loop that is gone."""
    fake = FakeWorker(tmp_path)
    await fake.start()
    yield fake
    await fake.die()
