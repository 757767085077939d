"""`serve` as a process, in front of workers of the test or none."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagecast.v1 import generation_pb2, generation_pb2_grpc, session_pb2, session_pb2_grpc
from tests.service.conftest import failure, until
from tests.service.fake_worker import FakeWorker
from tests.tiny_model import write_tiny_gguf

SCRIPT = """
import json, sys
from service.config import ServeSettings
from service.server import serve
sys.exit(serve(ServeSettings(**json.loads(sys.argv[1]))))
"""


SERVICES = ("pagecast.v1.SessionService", "pagecast.v1.GenerationService", "pagecast.v1.ModelService")


def generate_request(session_id: str) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(session_id=session_id, input=session_pb2.Input(text="hello"))


class Served:
    """A gateway process and the log lines that it wrote so far; all of them have to be JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def wait_for(self, event: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        while not self.lines or self.lines[-1]["event"] != event:
            line = await asyncio.wait_for(self.process.stderr.readline(), 30)
            assert line, f"ended without {event}: {self.lines}"
            self.lines.append(json.loads(line))
        return self.lines[-1]

    async def exit_code(self, timeout_s: float = 15) -> int:
        _, rest = await asyncio.wait_for(self.process.communicate(), timeout_s)
        self.lines += [json.loads(line) for line in rest.splitlines()]
        assert self.process.returncode is not None
        return self.process.returncode


async def start(**settings: Any) -> Served:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, json.dumps({"listen": "127.0.0.1:0", **settings}),
        stderr=asyncio.subprocess.PIPE,
        # As an operator starts it, and not as these tests are.
        env={name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"},
    )  # fmt: skip
    return Served(process)


def story(served: Served) -> list[str]:
    """The events but those of processes that come and go."""
    passing = {"worker_started", "worker_restarting"}
    return [line["event"] for line in served.lines if line["event"] not in passing]


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[FakeWorker]:
    """A worker that serves; ended also where a test fails, since gRPC crashes on a loop that is gone."""
    fake = FakeWorker(tmp_path)
    await fake.start()
    yield fake
    await fake.die()


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


async def test_a_port_in_use_is_one_clear_line(worker: FakeWorker) -> None:
    first = await start(worker_addresses=[worker.address])
    listen = (await first.wait_for("gateway_ready"))["listen"]
    second = await start(worker_addresses=[worker.address], listen=listen)
    assert await second.exit_code() == 1
    (line,) = second.lines
    assert line["event"] == "gateway_failed"
    assert f"cannot listen on {listen}" in line["error"]
    first.process.send_signal(signal.SIGTERM)
    assert await first.exit_code() == 0


async def test_an_address_of_no_machine_is_one_clear_line() -> None:
    served = await start(worker_addresses=["a:1"], listen="300.1.1.1:80")
    assert await served.exit_code() == 1
    (line,) = served.lines
    assert line["event"] == "gateway_failed"
    assert "cannot listen on 300.1.1.1:80" in line["error"]


async def test_a_worker_that_never_comes_is_one_clear_line(tmp_path: Path) -> None:
    served = await start(worker_addresses=[f"unix:{tmp_path}/none.sock"], start_timeout_s=0.5)
    assert await served.exit_code() == 1
    assert served.lines[-1]["event"] == "gateway_failed"
    assert "did not serve within 0.5 s" in served.lines[-1]["error"]


async def test_a_signal_ends_the_wait_for_workers(tmp_path: Path) -> None:
    served = await start(worker_addresses=[f"unix:{tmp_path}/none.sock"])
    await served.wait_for("gateway_starting")
    served.process.send_signal(signal.SIGTERM)
    assert await served.exit_code() == 0


@pytest.mark.e2e
async def test_a_worker_that_cannot_start_ends_the_gateway(tmp_path: Path) -> None:
    served = await start(model=str(tmp_path / "none.gguf"))
    assert await served.exit_code(timeout_s=60) == 1
    assert story(served) == ["gateway_starting", "worker_failed", "gateway_failed"]
    assert "exit code 3 before it served" in served.lines[-1]["error"]


@pytest.mark.e2e
async def test_a_pool_too_large_ends_the_gateway_and_names_the_flag(tmp_path: Path) -> None:
    # 1 MiB a block: 16 TiB, whatever the machine.
    model = write_tiny_gguf(tmp_path / "wide.gguf", num_heads=64, num_kv_heads=64, head_size=64)
    served = await start(model=str(model), kv_blocks=2**24)
    assert await served.exit_code(timeout_s=60) == 1
    assert story(served) == ["gateway_starting", "worker_failed", "gateway_failed"]
    (failed,) = [line for line in served.lines if line["event"] == "worker_failed"]
    assert "lower --kv-blocks" in failed["error"]
