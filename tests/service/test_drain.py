import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagecast._log import LogWriter, open_log
from pagecast.v1 import generation_pb2, generation_pb2_grpc, session_pb2, session_pb2_grpc
from service.drain import REFUSED_METHODS, DrainInterceptor, draining
from service.interceptors import ErrorInterceptor
from service.pool.link import WorkerLink
from service.router import Router
from service.server import SERVICES, Services, add_services
from tests.service.conftest import failure, until
from tests.service.fake_worker import FakeWorker


@dataclass
class Draining:
    """A server with the drain behind the errors, as the gateway's."""

    drain: DrainInterceptor
    services: Services
    channel: grpc.aio.Channel
    worker: FakeWorker


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Draining]:
    log = open_log(LogWriter(io.BytesIO()), "debug")
    worker = FakeWorker(tmp_path)
    await worker.start()
    link = await WorkerLink.connect(
        worker.address, version="0.1.0", exit_code=lambda: None, timeout_s=5.0, log=log
    )
    drain = DrainInterceptor()
    server = grpc.aio.server(interceptors=[ErrorInterceptor(log), drain])
    services = await add_services(server, Router([link]), log)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Draining(drain, services, channel, worker)
    await server.stop(None)
    await link.close()
    await worker.die()


def test_what_is_refused_are_methods_that_exist() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in (session_pb2.DESCRIPTOR, generation_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert methods > REFUSED_METHODS


async def test_new_work_is_refused_and_the_rest_is_answered(served: Draining) -> None:
    sessions: Any = session_pb2_grpc.SessionServiceStub(served.channel)
    generations: Any = generation_pb2_grpc.GenerationServiceStub(served.channel)
    session_id = (await sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))).session.session_id
    served.drain.begin()
    refused = [
        sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny")),
        sessions.AppendInput(session_pb2.AppendInputRequest(session_id=session_id)),
        generations.Generate(generation_pb2.GenerateRequest(session_id=session_id)).read(),
    ]
    assert len(refused) == len(REFUSED_METHODS)
    for call in refused:
        status, reason, _, whole = await failure(call)
        assert (status, reason) == ("UNAVAILABLE", "DRAINING")
        retry = error_details_pb2.RetryInfo()
        assert whole.details[1].Unpack(retry)
        assert retry.retry_delay.seconds > 0
    await sessions.GetSession(session_pb2.GetSessionRequest(session_id=session_id))
    await sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=session_id))
    assert served.worker.submits == {}


async def test_turns_go_on_and_those_that_take_too_long_end_as_draining(served: Draining) -> None:
    sessions: Any = session_pb2_grpc.SessionServiceStub(served.channel)
    generations: Any = generation_pb2_grpc.GenerationServiceStub(served.channel)
    session_id = (await sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))).session.session_id
    call = generations.Generate(
        generation_pb2.GenerateRequest(session_id=session_id, input=session_pb2.Input(text="hello"))
    )
    await until(lambda: len(served.worker.submits) == 1)
    (generation_id,) = served.worker.submits
    served.drain.begin()
    await served.worker.emit_token(generation_id, 0)
    assert (await call.read()).chunk.tokens[0].id == 0
    assert served.services.turns.num_running == 1
    served.services.turns.fail_all(draining())
    status, reason, _, _ = await failure(call.read())
    assert (status, reason) == ("UNAVAILABLE", "DRAINING")
    await until(lambda: served.worker.cancels == [generation_id])
    await asyncio.wait_for(served.services.turns.wait_idle(), 5.0)


async def test_health_tells_every_change_and_lists_all(served: Draining) -> None:
    stub: Any = health_pb2_grpc.HealthStub(served.channel)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", *SERVICES)]
    for is_serving in (True, False, True):
        await served.services.health.tell(is_serving=is_serving)
        expected = serving if is_serving else not_serving
        assert [(await watch.read()).status for watch in watches] == [expected] * len(watches)
        for name in ("", *SERVICES):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == expected
        listed = await stub.List(health_pb2.HealthListRequest())
        assert {name: answer.status for name, answer in listed.statuses.items()} == dict.fromkeys(
            ("", *SERVICES), expected
        )
    await served.services.health.end()
    await served.services.health.tell(is_serving=True)
    assert (await watches[0].read()).status == not_serving
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == not_serving
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="pagecast.v1.Nothing"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    for watch in watches:
        watch.cancel()
