"""`serve` as a process, in front of workers of the test."""

import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagecast.v1 import generation_pb2, generation_pb2_grpc, session_pb2, session_pb2_grpc
from tests.service.conftest import failure, until
from tests.service.fake_worker import FakeWorker
from tests.service.served import start

SERVICES = ("pagecast.v1.SessionService", "pagecast.v1.GenerationService", "pagecast.v1.ModelService")


def generate_request(session_id: str) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(session_id=session_id, input=session_pb2.Input(text="hello"))


async def test_serves_and_stops_on_sigterm(worker: FakeWorker) -> None:
    served = await start(worker_addresses=[worker.address])
    ready = await served.wait_for("gateway_ready")
    assert ready["models"] == ["tiny"]

    async with grpc.aio.insecure_channel(ready["listen"]) as channel:
        sessions: Any = session_pb2_grpc.SessionServiceStub(channel)
        generations: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        opened = await sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))
        call = generations.Generate(generate_request(opened.session.session_id))
        await until(lambda: len(worker.submits) == 1)
        (generation_id,) = worker.submits
        await worker.emit_token(generation_id, 0)
        await call.read()
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

        served.process.send_signal(signal.SIGTERM)
        await served.wait_for("gateway_stopping")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        # What is new is refused, and a stream that ends in time ends whole.
        status, reason, _, _ = await failure(
            sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))
        )
        assert (status, reason) == ("UNAVAILABLE", "DRAINING")
        await worker.emit_finish(generation_id)
        assert (await call.read()).finished.finish_reason == generation_pb2.FINISH_REASON_EOS
        watch.cancel()
        assert await served.exit_code() == 0
    assert [line["event"] for line in served.lines][-2:] == ["generation", "gateway_stopped"]
    assert worker.cancels == []


async def test_a_second_signal_ends_at_once_and_cancels_turns(worker: FakeWorker) -> None:
    served = await start(worker_addresses=[worker.address])
    ready = await served.wait_for("gateway_ready")
    async with grpc.aio.insecure_channel(ready["listen"]) as channel:
        sessions: Any = session_pb2_grpc.SessionServiceStub(channel)
        generations: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        opened = await sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))
        call = generations.Generate(generate_request(opened.session.session_id))
        await until(lambda: len(worker.submits) == 1)
        served.process.send_signal(signal.SIGINT)
        await served.wait_for("gateway_stopping")
        served.process.send_signal(signal.SIGINT)
        assert await served.exit_code(timeout_s=3) == 0
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    assert worker.cancels == list(worker.submits)


async def test_turns_that_outlast_the_drain_end_as_draining(worker: FakeWorker) -> None:
    served = await start(worker_addresses=[worker.address], drain_timeout_s=0.3)
    ready = await served.wait_for("gateway_ready")
    async with grpc.aio.insecure_channel(ready["listen"]) as channel:
        sessions: Any = session_pb2_grpc.SessionServiceStub(channel)
        generations: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        opened = await sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))
        call = generations.Generate(generate_request(opened.session.session_id))
        await until(lambda: len(worker.submits) == 1)
        served.process.send_signal(signal.SIGTERM)
        started_s = time.monotonic()
        status, reason, _, _ = await failure(call.read())
        assert (status, reason) == ("UNAVAILABLE", "DRAINING")
        assert time.monotonic() - started_s > 0.25
        assert await served.exit_code(timeout_s=5) == 0
    assert worker.cancels == list(worker.submits)


async def test_an_idle_gateway_drains_at_once(worker: FakeWorker) -> None:
    served = await start(worker_addresses=[worker.address], drain_timeout_s=60.0)
    await served.wait_for("gateway_ready")
    served.process.send_signal(signal.SIGTERM)
    assert await served.exit_code(timeout_s=5) == 0


async def test_a_gateway_without_workers_says_so_and_recovers(worker: FakeWorker, tmp_path: Path) -> None:
    served = await start(worker_addresses=[worker.address])
    ready = await served.wait_for("gateway_ready")
    async with grpc.aio.insecure_channel(ready["listen"]) as channel:
        sessions: Any = session_pb2_grpc.SessionServiceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        opened = await sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))
        session_id = opened.session.session_id
        await worker.die()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        status, reason, _, _ = await failure(
            sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))
        )
        assert (status, reason) == ("UNAVAILABLE", "NO_WORKER")
        got = await sessions.GetSession(session_pb2.GetSessionRequest(session_id=session_id))
        assert got.session.state == session_pb2.SESSION_STATE_FAILED

        another = FakeWorker(tmp_path)
        another.address = worker.address
        await another.start()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        reopened = await sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))
        assert list(another.sessions) == [reopened.session.session_id]
        close = session_pb2.CloseSessionRequest(session_id=session_id)
        for _ in range(2):
            closed = await sessions.CloseSession(close)
            assert closed.session.state == session_pb2.SESSION_STATE_CLOSED
        watch.cancel()
        served.process.send_signal(signal.SIGTERM)
        assert await served.exit_code() == 0
        await another.die()
    assert [line["index"] for line in served.lines if line["event"] == "worker_lost"] == [0]


async def test_a_worker_that_was_out_of_reach_comes_back_without_the_sessions_that_failed(
    worker: FakeWorker,
) -> None:
    served = await start(worker_addresses=[worker.address])
    ready = await served.wait_for("gateway_ready")
    async with grpc.aio.insecure_channel(ready["listen"]) as channel:
        sessions: Any = session_pb2_grpc.SessionServiceStub(channel)
        opened = await sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))
        await worker.die()  # its server only: sessions and instance stay
        await served.wait_for("worker_lost")
        assert list(worker.sessions) == [opened.session.session_id]
        worker._server = grpc.aio.server()
        await worker.start()
        await until(lambda: not worker.sessions)
        served.process.send_signal(signal.SIGTERM)
        assert await served.exit_code() == 0
