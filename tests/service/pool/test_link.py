import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pagecast.v1 import session_pb2
from pagecast.worker.v1 import worker_pb2
from service.errors import PagecastError, Reason, StartError
from service.pool import link as link_module
from service.pool.link import WorkerLink
from tests.service.conftest import Gateway, MakeGateway, drain, failure, until
from tests.service.fake_worker import FakeWorker
from tests.service.pool.conftest import NoLog


async def connect(
    worker: FakeWorker, *, exit_code: int | None = None, timeout_s: float = 5.0, **more: Any
) -> WorkerLink:
    return await WorkerLink.connect(
        worker.address,
        version="0.1.0",
        exit_code=lambda: exit_code,
        timeout_s=timeout_s,
        **{"log": NoLog()} | more,
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
    await until(lambda: gateway.links[0]._steps.last_report == 1)
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
    await until(lambda: gateway.links[0]._steps.last_report == 1)
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

    with pytest.raises(PagecastError) as caught:
        await gateway.links[0].call(
            gateway.links[0].stub.GetSession, worker_pb2.GetSessionRequest(session_id=session_id)
        )
    assert caught.value.reason is Reason.WORKER_LOST
    status, reason, _, _ = await failure(gateway.generate(session_id).read())
    assert (status, reason) == ("FAILED_PRECONDITION", "SESSION_FAILED")
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


async def test_an_answer_that_does_not_come_in_time_is_no_lost_worker(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "CALL_TIMEOUT_S", 0.2)
    gateway.worker.submit_gate.clear()
    status, reason, _, whole = await failure(drain(gateway.generate(await gateway.open())))
    assert (status, reason) == ("UNAVAILABLE", "NO_WORKER")
    assert whole.message == "the worker did not answer in time"
    assert not gateway.links[0].lost.is_set()
    # It may have been accepted all the same.
    await until(lambda: gateway.worker.cancels == list(gateway.worker.submits))


async def test_a_call_that_breaks_waits_to_know_whether_the_worker_is_lost(tmp_path: Path) -> None:
    worker = FakeWorker(tmp_path)
    await worker.start()
    codes: list[int] = []
    link = await WorkerLink.connect(
        worker.address, version="0.1.0", exit_code=lambda: codes[0] if codes else None, timeout_s=5.0,
        log=NoLog(),  # type: ignore[arg-type]
    )  # fmt: skip
    worker.submit_gate.clear()
    submit = worker_pb2.SubmitRequest(generation_id="g", session_id="s")
    call = asyncio.create_task(link.call(link.stub.Submit, submit))
    await until(lambda: "g" in worker.submits)
    codes.append(-9)
    await worker.die()
    with pytest.raises(PagecastError) as caught:
        await call
    assert caught.value.reason is Reason.WORKER_LOST
    assert link.lost.is_set()
    assert not link.is_hung
    await link.close()


class GuardedWorker(FakeWorker):
    """Keeps the metadata of what it is asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tokens: list[str] = []

    def note(self, context: Any) -> None:
        self.tokens.append(dict(context.invocation_metadata()).get("pagecast-token", ""))

    async def GetWorkerInfo(self, request: Any, context: Any) -> worker_pb2.GetWorkerInfoResponse:  # noqa: N802
        self.note(context)
        return await super().GetWorkerInfo(request, context)

    async def OpenSession(self, request: Any, context: Any) -> worker_pb2.OpenSessionResponse:  # noqa: N802
        self.note(context)
        return await super().OpenSession(request, context)

    async def StreamSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.note(context)
        async for report in super().StreamSteps(request, context):
            yield report


@pytest.mark.parametrize("token", ["", "0123abcd"])
async def test_every_call_carries_the_token(tmp_path: Path, token: str) -> None:
    worker = GuardedWorker(tmp_path)
    await worker.start()
    link = await connect(worker, token=token)
    await link.call(link.stub.OpenSession, worker_pb2.OpenSessionRequest(session_id="s"))
    await until(lambda: worker.num_readers == 1)
    assert worker.tokens == [token] * 3
    await link.close()
    await worker.die()


async def test_a_bug_in_the_worker_is_internal_and_tells_nothing(gateway: Gateway) -> None:
    session_id = await gateway.open()
    gateway.worker.sessions = None  # type: ignore[assignment]  # its GetSession now raises
    call = gateway.sessions.GetSession(session_pb2.GetSessionRequest(session_id=session_id))
    status, reason, _, whole = await failure(call)
    assert (status, reason) == ("INTERNAL", "INTERNAL")
    assert b"NoneType" not in whole.SerializeToString()


async def test_close_ends_followed_generations(tmp_path: Path) -> None:
    worker = FakeWorker(tmp_path)
    await worker.start()
    link = await connect(worker)
    with link.follow("gen") as mailbox:
        await link.close()
        with pytest.raises(Exception, match="WORKER_LOST"):
            await mailbox.hand_to(lambda _: True)
    assert link.lost.is_set()
    await until(lambda: worker.num_readers == 0)
    await worker.die()


async def test_background_work_that_a_closing_link_cuts_before_it_began_is_never_made(tmp_path: Path) -> None:
    worker = FakeWorker(tmp_path)
    await worker.start()
    link = await connect(worker)
    made = []

    async def work() -> None:
        made.append("work")

    task = asyncio.create_task(link.attempt(work))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not made  # and pytest sees no coroutine that nobody awaited
    await link.close()
    await worker.die()


def test_a_finished_mailbox_gives_its_events_before_its_error() -> None:
    async def run() -> None:
        mailbox = link_module.Mailbox()
        mailbox.put(worker_pb2.GenerationEvent(generation_id="g"))
        mailbox.fail(KeyError("first"))
        mailbox.fail(KeyError("second"))
        assert (await mailbox.hand_to(lambda _: False)).generation_id == "g"
        with pytest.raises(KeyError, match="first"):
            await mailbox.hand_to(lambda _: True)

    asyncio.run(run())
