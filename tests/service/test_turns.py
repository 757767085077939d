"""Turns as the gateway keeps them; their calls are in test_generation."""

import asyncio
import uuid

import grpc
import pytest

from pagecast.v1 import generation_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from service import turns as turns_module
from service.errors import PagecastError, Reason
from tests.service.conftest import Gateway, drain, failure, until

DRAINING = PagecastError(Reason.DRAINING, "the gateway stops")


async def test_s02_the_clients_deadline_goes_to_the_worker(gateway: Gateway) -> None:
    """S2: a queued turn that nobody waits for any more is dropped, with the client's own status."""
    gateway.worker.drops_late = True
    call = gateway.generate(await gateway.open(), timeout=0.4)
    generation_id = await gateway.submitted()
    submit = gateway.worker.submits[generation_id]
    assert 0 < submit.deadline.ToNanoseconds() <= 0.45e9
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    (line,) = await gateway.log_lines("generation")
    assert line["status"] == "DEADLINE_EXCEEDED"


async def test_no_deadline_is_none(gateway: Gateway) -> None:
    call = gateway.generate(await gateway.open())
    generation_id = await gateway.submitted()
    assert not gateway.worker.submits[generation_id].HasField("deadline")
    await gateway.worker.emit_finish(generation_id)
    await drain(call)


async def test_a_turn_that_the_worker_drops_as_late_has_the_deadlines_status(gateway: Gateway) -> None:
    call = gateway.generate(await gateway.open())
    generation_id = await gateway.submitted()
    late = worker_pb2.Refusal(reason="DEADLINE_EXCEEDED", message="late")
    await gateway.worker.emit(generation_id, failed=late)
    status, reason, _, _ = await failure(drain(call))
    assert (status, reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
    assert gateway.worker.cancels == []


KEPT = generation_pb2.CANCEL_POLICY_KEEP_PARTIAL
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED


async def test_a_turn_that_the_worker_kept_when_it_was_late_is_committed(gateway: Gateway) -> None:
    """Who watches it gets the deadline's status, and the session's snapshot moves on."""
    session_id = await gateway.open()
    request = generation_pb2.GenerateRequest(
        session_id=session_id, input=session_pb2.Input(text="x"), cancel_policy=KEPT
    )
    call = gateway.generations.Generate(request)
    generation_id = await gateway.submitted()
    (turn,) = gateway.turns._running
    await gateway.worker.emit_token(generation_id, 0)
    await gateway.worker.emit_finish(generation_id, CANCELLED, is_late=True)
    assert (await call.read()).HasField("chunk")
    status, reason, _, _ = await failure(call.read())
    assert (status, reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
    assert turn.is_committed
    snapshot = gateway.router.snapshot(session_id)
    assert snapshot is not None
    assert (snapshot.revision, snapshot.num_tokens) == (1, 5)
    assert gateway.worker.cancels == []
    (line,) = await gateway.log_lines("generation")
    assert (line["status"], line["error_reason"]) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
    assert line["finish_reason"] == "CANCELLED"


async def test_a_turn_that_was_kept_late_is_told_whole_to_who_comes_later(gateway: Gateway) -> None:
    submit = worker_pb2.SubmitRequest(generation_id="g", session_id="s", cancel_policy=KEPT)
    turn = gateway.turns.start(gateway.links[0], submit, keeps_all=True)
    await gateway.submitted()
    await gateway.worker.emit_token("g", 0)
    await gateway.worker.emit_finish("g", CANCELLED, is_late=True)
    with pytest.raises(PagecastError, match="DEADLINE_EXCEEDED"):
        [event async for event in turn.watch()]
    await turn.ended()
    again = [event async for event in turn.watch()]
    assert [event.WhichOneof("event") for event in again] == ["chunk", "finished"]
    assert again[-1].finished.finish_reason == CANCELLED


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_deadline_that_the_gateway_sees_first_keeps_the_turn_for_a_retry(
    gateway: Gateway, *, is_answered: bool
) -> None:
    """Also where the cancel comes too late, since the turn's end is on its way."""
    session_id = await gateway.open()
    request = generation_pb2.GenerateRequest(
        session_id=session_id,
        input=session_pb2.Input(text="x"),
        cancel_policy=KEPT,
        request_id=str(uuid.uuid4()),
    )
    if not is_answered:
        gateway.worker.refusals["Cancel"] = worker_pb2.Refusal(reason="GENERATION_NOT_FOUND", message="none")
    call = gateway.generations.Generate(request, timeout=0.3)
    generation_id = await gateway.submitted()
    await gateway.worker.emit_token(generation_id, 0)
    with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
        await drain(call)
    await until(lambda: gateway.worker.cancels == [generation_id])
    if not is_answered:
        await gateway.worker.emit_finish(generation_id, CANCELLED)
    again = await drain(gateway.generations.Generate(request))
    assert [response.WhichOneof("event") for response in again] == ["chunk", "finished"]
    assert again[-1].finished.finish_reason == CANCELLED
    assert len(gateway.worker.submits) == 1
    snapshot = gateway.router.snapshot(session_id)
    assert snapshot is not None
    assert snapshot.revision == 1


@pytest.mark.parametrize("reason", ["QUEUE_TIMEOUT", "NUMERIC_FAILURE", "KV_EXHAUSTED"])
async def test_failures_have_the_status_of_their_reason(gateway: Gateway, reason: str) -> None:
    call = gateway.generate(await gateway.open())
    generation_id = await gateway.submitted()
    await gateway.worker.emit_token(generation_id, 0)
    await gateway.worker.emit(generation_id, failed=worker_pb2.Refusal(reason=reason, message="m"))
    status, told, _, _ = await failure(drain(call))
    assert told == reason
    (line,) = await gateway.log_lines("generation")
    assert (line["status"], line["error_reason"], line["finish_reason"]) == (status, reason, None)
    assert line["output_tokens"] == 1


async def test_a_drain_ends_every_stream_and_waits_for_the_workers(gateway: Gateway) -> None:
    calls = [gateway.generate(await gateway.open()) for _ in range(3)]
    await gateway.submitted(3)
    assert gateway.turns.num_running == 3
    idle = asyncio.create_task(gateway.turns.wait_idle())
    await asyncio.sleep(0.02)
    assert not idle.done()
    gateway.turns.fail_all(DRAINING)
    for call in calls:
        status, reason, _, _ = await failure(drain(call))
        assert (status, reason) == ("UNAVAILABLE", "DRAINING")
    await asyncio.wait_for(idle, 5)
    assert gateway.turns.num_running == 0
    assert sorted(gateway.worker.cancels) == sorted(gateway.worker.submits)
    lines = await gateway.log_lines("generation", 3)
    assert {(line["status"], line["error_reason"]) for line in lines} == {("UNAVAILABLE", "DRAINING")}


async def test_a_drain_during_submit_cancels_after_its_reply(gateway: Gateway) -> None:
    gateway.worker.submit_gate.clear()
    call = gateway.generate(await gateway.open())
    generation_id = await gateway.submitted()
    gateway.turns.fail_all(DRAINING)
    status, reason, _, _ = await failure(drain(call))
    assert (status, reason) == ("UNAVAILABLE", "DRAINING")
    assert gateway.worker.cancels == []
    gateway.worker.submit_gate.set()
    await asyncio.wait_for(gateway.turns.wait_idle(), 5)
    assert gateway.worker.cancels == [generation_id]


async def test_a_cancel_whose_end_never_comes_is_not_waited_for_for_ever(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "END_AFTER_CANCEL_S", 0.1)
    gateway.worker.refusals["Cancel"] = worker_pb2.Refusal(reason="GENERATION_NOT_FOUND", message="none")
    call = gateway.generate(await gateway.open())
    generation_id = await gateway.submitted()
    call.cancel()
    await asyncio.wait_for(gateway.turns.wait_idle(), 5)
    assert gateway.worker.cancels == [generation_id]
    (line,) = await gateway.log_lines("generation")
    assert (line["status"], line["finish_reason"]) == ("CANCELLED", None)


async def test_a_turn_whose_worker_is_lost_while_it_is_cancelled_leaves_no_task(gateway: Gateway) -> None:
    call = gateway.generate(await gateway.open())
    await gateway.submitted()
    await gateway.worker.die()
    (turn,) = gateway.turns._running
    turn.fail(DRAINING)
    await failure(drain(call))
    await asyncio.sleep(0.1)  # by now its cancel waits to know whether the worker is lost
    gateway.links[0]._hang("as the test says")
    await turn.ended()
    await until(lambda: not gateway.links[0]._background, timeout_s=1.0)


async def test_a_lost_worker_ends_its_turns(gateway: Gateway) -> None:
    call = gateway.generate(await gateway.open())
    await gateway.submitted()
    gateway.links[0]._hang("as the test says")
    status, reason, _, _ = await failure(drain(call))
    assert (status, reason) == ("UNAVAILABLE", "WORKER_LOST")
    await until(lambda: gateway.turns.num_running == 0)


async def test_keeping_partial_commits_a_cancelled_turn(gateway: Gateway) -> None:
    for policy, is_committed in (
        (generation_pb2.CANCEL_POLICY_UNSPECIFIED, False),
        (generation_pb2.CANCEL_POLICY_ROLLBACK, False),
        (generation_pb2.CANCEL_POLICY_KEEP_PARTIAL, True),
    ):
        request = generation_pb2.GenerateRequest(
            session_id=await gateway.open(), input=session_pb2.Input(text="x"), cancel_policy=policy
        )
        call = gateway.generations.Generate(request)
        generation_id = await gateway.submitted(len(gateway.worker.submits) + 1)
        (turn,) = gateway.turns._running
        await gateway.worker.emit_finish(generation_id, generation_pb2.FINISH_REASON_CANCELLED)
        await drain(call)
        assert turn.is_committed == is_committed
