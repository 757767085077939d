import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from pagecast.v1 import session_pb2
from pagecast.worker.v1 import worker_pb2
from service.errors import StartError
from service.pool import link as link_module
from service.pool.link import WorkerLink
from tests.service.conftest import Gateway, MakeGateway, drain, failure, until
from tests.service.fake_worker import FakeWorker


class NoLog:
    def bind(self, **_: Any) -> "NoLog":
        return self

    def debug(self, *_: Any, **__: Any) -> None:
        """Tells nobody."""

    info = warning = error = debug


async def connect(worker: FakeWorker, *, exit_code: int | None = None, timeout_s: float = 5.0) -> WorkerLink:
    return await WorkerLink.connect(
        worker.address,
        version="0.1.0",
        exit_code=lambda: exit_code,
        timeout_s=timeout_s,
        log=NoLog(),  # type: ignore[arg-type]
    )


async def test_a_worker_of_another_version_is_not_used(tmp_path: Path) -> None:
    worker = FakeWorker(tmp_path, version="9.9.9")
    await worker.start()
    with pytest.raises(StartError, match=r"'9\.9\.9'.*'0\.1\.0'"):
        await connect(worker)
    await worker.die()


async def test_a_worker_that_ends_before_it_serves_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="exit code 3"):
        await connect(FakeWorker(tmp_path), exit_code=3, timeout_s=60.0)


async def test_a_worker_that_never_serves_times_out(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="did not serve within"):
        await connect(FakeWorker(tmp_path), timeout_s=0.3)


async def test_connect_waits_for_a_worker_that_comes_later(tmp_path: Path) -> None:
    worker = FakeWorker(tmp_path)
    connecting = asyncio.create_task(connect(worker))
    await asyncio.sleep(0.3)
    assert not connecting.done()
    await worker.start()
    link = await connecting
    assert link.model.name == "tiny"
    await link.close()
    await worker.die()


async def test_a_cut_report_stream_resumes_without_loss(gateway: Gateway) -> None:
    call = gateway.generate(await gateway.open())
    generation_id = await gateway.submitted()
    await gateway.worker.emit_token(generation_id, 0)
    await until(lambda: gateway.links[0]._last_report == 1)
    await gateway.worker.cut_streams()
    await gateway.worker.emit_token(generation_id, 1)
    await gateway.worker.emit_finish(generation_id)
    responses = await drain(call)
    assert [token.id for response in responses for token in response.chunk.tokens] == [0, 1]
    assert gateway.worker.num_readers == 1
    assert not gateway.links[0].lost.is_set()


async def test_reports_that_are_no_longer_kept_fail_the_streams_they_may_concern(gateway: Gateway) -> None:
    session_id = await gateway.open()
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted()
    await gateway.worker.emit_token(generation_id, 0)
    await until(lambda: gateway.links[0]._last_report == 1)
    await gateway.worker.cut_streams()
    for index in range(1, 4):
        await gateway.worker.emit_token(generation_id, index)
    gateway.worker.first_kept = 3
    status, reason, _, _ = await failure(drain(call))
    assert (status, reason) == ("UNAVAILABLE", "WORKER_LOST")
    # The turn still runs in the worker, which is there: it is cancelled.
    await until(lambda: gateway.worker.cancels == [generation_id])


async def test_a_lost_worker_ends_streams_and_later_calls(gateway: Gateway) -> None:
    session_id = await gateway.open()
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted()
    await gateway.worker.emit_token(generation_id, 0)
    await call.read()
    started_s = time.monotonic()
    await gateway.worker.die()
    status, reason, _, _ = await failure(call.read())
    assert (status, reason) == ("UNAVAILABLE", "WORKER_LOST")
    assert time.monotonic() - started_s < link_module.RECONNECT_S + 2
    (line,) = await gateway.log_lines("generation")
    assert line["status"] == "UNAVAILABLE"

    calls = [
        gateway.sessions.GetSession(session_pb2.GetSessionRequest(session_id=session_id)),
        gateway.sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=session_id)),
        gateway.generate(session_id).read(),
    ]
    for later in calls:
        status, reason, _, _ = await failure(later)
        assert (status, reason) == ("UNAVAILABLE", "WORKER_LOST")
    opening = gateway.sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))
    status, reason, _, _ = await failure(opening)
    assert (status, reason) == ("UNAVAILABLE", "NO_WORKER")


async def test_a_lost_worker_leaves_the_others_serving(make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(2)
    await gateway.workers[0].die()
    await until(gateway.links[0].lost.is_set)
    for _ in range(2):
        await gateway.open()
    assert len(gateway.workers[1].sessions) == 2


async def test_a_restarted_worker_is_another_worker(gateway: Gateway) -> None:
    call = gateway.generate(await gateway.open())
    await gateway.submitted()
    gateway.worker.info.instance_id = "another"
    await gateway.worker.cut_streams()
    status, reason, _, _ = await failure(drain(call))
    assert (status, reason) == ("UNAVAILABLE", "WORKER_LOST")
    assert gateway.links[0].lost.is_set()


async def test_an_answer_that_does_not_come_is_a_lost_worker(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "CALL_TIMEOUT_S", 0.2)
    gateway.worker.submit_gate.clear()
    status, reason, _, _ = await failure(drain(gateway.generate(await gateway.open())))
    assert (status, reason) == ("UNAVAILABLE", "WORKER_LOST")
    # It may have been accepted all the same.
    await until(lambda: gateway.worker.cancels == list(gateway.worker.submits))


async def test_a_bug_in_the_worker_is_internal_and_tells_nothing(gateway: Gateway) -> None:
    session_id = await gateway.open()
    gateway.worker.sessions.clear()  # its GetSession now raises KeyError
    call = gateway.sessions.GetSession(session_pb2.GetSessionRequest(session_id=session_id))
    status, reason, _, whole = await failure(call)
    assert (status, reason) == ("INTERNAL", "INTERNAL")
    assert b"KeyError" not in whole.SerializeToString()


async def test_close_ends_followed_generations(tmp_path: Path) -> None:
    worker = FakeWorker(tmp_path)
    await worker.start()
    link = await connect(worker)
    with link.follow("gen") as mailbox:
        await link.close()
        with pytest.raises(Exception, match="WORKER_LOST"):
            await mailbox.take()
    assert link.lost.is_set()
    await until(lambda: worker.num_readers == 0)
    await worker.die()


def test_a_finished_mailbox_gives_its_events_before_its_error() -> None:
    async def run() -> None:
        mailbox = link_module.Mailbox()
        mailbox.put(worker_pb2.GenerationEvent(generation_id="g"))
        mailbox.fail(KeyError("first"))
        mailbox.fail(KeyError("second"))
        assert (await mailbox.take()).generation_id == "g"
        with pytest.raises(KeyError, match="first"):
            await mailbox.take()

    asyncio.run(run())
