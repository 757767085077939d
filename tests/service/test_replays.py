"""Retries with a request id, over gRPC (S7)."""

import asyncio
import uuid
from typing import Any

import pytest

from pagecast.v1 import generation_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from tests.service.conftest import Gateway, drain, failure, until

STARTED = generation_pb2.GenerationStarted(usage=generation_pb2.Usage(input_tokens=3))


def new_id() -> str:
    return str(uuid.uuid4())


def generate(session_id: str, request_id: str, text: str = "hi", **fields: Any) -> Any:
    return generation_pb2.GenerateRequest(
        request_id=request_id, session_id=session_id, input=session_pb2.Input(text=text), **fields
    )


def tokens(responses: list[generation_pb2.GenerateResponse]) -> list[int]:
    return [token.id for response in responses for token in response.chunk.tokens]


async def test_s07_a_retried_turn_replays_its_events_and_runs_once(gateway: Gateway) -> None:
    """S7: the same request id again gets the first call's events, and the worker sees one turn."""
    request = generate(await gateway.open(), new_id())
    call = gateway.generations.Generate(request)
    generation_id = await gateway.submitted()
    await gateway.worker.emit(generation_id, started=STARTED)
    for index in range(5):
        await gateway.worker.emit_token(generation_id, index)
    await gateway.worker.emit_finish(generation_id)
    first = await drain(call)
    for _ in range(2):
        again = await drain(gateway.generations.Generate(request))
        assert (again[0], again[-1]) == (first[0], first[-1])
        assert tokens(again) == tokens(first) == [0, 1, 2, 3, 4]
        assert len(again) == 3  # chunks of a turn that is over are merged
    assert len(gateway.worker.submits) == 1
    assert len(await gateway.log_lines("generation")) == 1


async def test_s07_a_retry_follows_a_turn_that_runs_and_only_the_last_to_leave_cancels(
    gateway: Gateway,
) -> None:
    """S7: a duplicate while the first runs neither disturbs it nor starts another."""
    request = generate(await gateway.open(), new_id())
    first = gateway.generations.Generate(request)
    generation_id = await gateway.submitted()
    await gateway.worker.emit(generation_id, started=STARTED)
    await gateway.worker.emit_token(generation_id, 0)
    await first.read()
    second = gateway.generations.Generate(request)
    await second.read()
    first.cancel()
    await asyncio.sleep(0.05)
    assert gateway.worker.cancels == []
    await gateway.worker.emit_token(generation_id, 1)
    third = gateway.generations.Generate(request)
    await third.read()
    second.cancel()
    await asyncio.sleep(0.05)
    assert gateway.worker.cancels == []
    third.cancel()
    await until(lambda: gateway.worker.cancels == [generation_id])
    await until(lambda: gateway.turns.num_running == 0)
    assert len(gateway.worker.submits) == 1


async def test_s07_another_payload_or_method_is_refused(gateway: Gateway) -> None:
    """S7: a request id that was used for something else is ALREADY_EXISTS."""
    request_id, session_id = new_id(), await gateway.open()
    update = session_pb2.UpdateSessionRequest(
        request_id=request_id, session_id=session_id, labels={"a": "1", "b": "2"}
    )
    await gateway.sessions.UpdateSession(update)
    other = session_pb2.UpdateSessionRequest(
        request_id=request_id, session_id=session_id, labels={"a": "1", "b": "3"}
    )
    for call in (
        gateway.sessions.UpdateSession(other),
        gateway.sessions.CloseSession(
            session_pb2.CloseSessionRequest(request_id=request_id, session_id=session_id)
        ),
        gateway.generations.Generate(generate(session_id, request_id)).read(),
        gateway.sessions.OpenSession(
            session_pb2.OpenSessionRequest(request_id=request_id.upper(), model="tiny")
        ),
    ):
        status, reason, metadata, _ = await failure(call)
        assert (status, reason) == ("ALREADY_EXISTS", "REQUEST_ID_REUSED")
        assert metadata["field"] == "request_id"
    assert gateway.worker.calls.count("UpdateSession") == 1
    assert gateway.worker.submits == {}


async def test_s07_the_order_of_a_map_makes_no_other_request(gateway: Gateway) -> None:
    """S7: a retry is told by its content, not by how its bytes happen to lie."""
    session_id, request_id = await gateway.open(), new_id()
    labels = {str(index): "v" for index in range(40)}
    for order in (labels, dict(reversed(labels.items()))):
        request = session_pb2.UpdateSessionRequest(request_id=request_id, session_id=session_id, labels=order)
        await gateway.sessions.UpdateSession(request)
    assert gateway.worker.calls.count("UpdateSession") == 1


@pytest.mark.parametrize("name", ["OpenSession", "AppendInput", "CloseSession", "CancelGeneration"])
async def test_s07_unary_retries_get_the_first_answer(gateway: Gateway, name: str) -> None:
    """S7: nothing is done twice."""
    session_id, request_id = await gateway.open(), new_id()
    running = gateway.generate(await gateway.open()) if name == "CancelGeneration" else None
    if running is not None:
        await gateway.submitted()
    call, request = {
        "OpenSession": (
            gateway.sessions.OpenSession,
            session_pb2.OpenSessionRequest(request_id=request_id, model="tiny"),
        ),
        "AppendInput": (
            gateway.sessions.AppendInput,
            session_pb2.AppendInputRequest(
                request_id=request_id, session_id=session_id, input=session_pb2.Input(text="abc")
            ),
        ),
        "CloseSession": (
            gateway.sessions.CloseSession,
            session_pb2.CloseSessionRequest(request_id=request_id, session_id=session_id),
        ),
        "CancelGeneration": (
            gateway.generations.CancelGeneration,
            generation_pb2.CancelGenerationRequest(
                request_id=request_id,
                session_id=session_id,
                generation_id=next(iter(gateway.worker.submits), ""),
            ),
        ),
    }[name]
    first = await call(request)
    calls, num_sessions = list(gateway.worker.calls), len(gateway.worker.sessions)
    submits, cancels = len(gateway.worker.submits), list(gateway.worker.cancels)
    assert await call(request) == first
    assert gateway.worker.calls == calls
    assert len(gateway.worker.sessions) == num_sessions
    assert (len(gateway.worker.submits), gateway.worker.cancels) == (submits, cancels)
    if running is not None:
        await drain(running)


async def test_a_retry_of_a_call_that_runs_waits_for_it(gateway: Gateway) -> None:
    request = session_pb2.OpenSessionRequest(request_id=new_id(), model="tiny")
    gateway.worker.open_gate.clear()
    calls = [gateway.sessions.OpenSession(request) for _ in range(3)]
    await until(lambda: gateway.worker.calls == ["OpenSession"])
    await asyncio.sleep(0.05)
    calls[0].cancel()
    gateway.worker.open_gate.set()
    second, third = await asyncio.gather(*calls[1:])
    assert second == third
    assert list(gateway.worker.sessions) == [second.session.session_id]


async def test_an_open_that_all_callers_left_is_undone_and_its_retry_opens_anew(gateway: Gateway) -> None:
    request = session_pb2.OpenSessionRequest(request_id=new_id(), model="tiny")
    gateway.worker.open_gate.clear()
    call = gateway.sessions.OpenSession(request)
    await until(lambda: gateway.worker.calls == ["OpenSession"])
    call.cancel()
    await asyncio.sleep(0.05)
    gateway.worker.open_gate.set()
    session = (await gateway.sessions.OpenSession(request)).session
    await until(lambda: list(gateway.worker.sessions) == [session.session_id])


async def test_a_retry_waits_for_the_end_of_an_append_that_is_being_cancelled(gateway: Gateway) -> None:
    request = session_pb2.AppendInputRequest(
        request_id=new_id(), session_id=await gateway.open(), input=session_pb2.Input(text="abc")
    )
    gateway.worker.submit_gate.clear()
    gateway.worker.append_gate.clear()
    call = gateway.sessions.AppendInput(request)
    first = await gateway.submitted()
    call.cancel()
    await until(lambda: all(turn.is_leaving for turn in gateway.turns._running))
    again = gateway.sessions.AppendInput(request)
    await asyncio.sleep(0.05)
    assert len(gateway.worker.submits) == 1
    gateway.worker.submit_gate.set()
    await gateway.submitted(2)
    assert gateway.worker.cancels == [first]
    gateway.worker.append_gate.set()
    assert (await again).session.num_tokens == 3


async def test_a_refused_turn_leaves_no_record(gateway: Gateway) -> None:
    request = generate(await gateway.open(), new_id())
    gateway.worker.refusals["Submit"] = worker_pb2.Refusal(reason="SESSION_BUSY", message="busy")
    status, reason, _, _ = await failure(drain(gateway.generations.Generate(request)))
    assert (status, reason) == ("ABORTED", "SESSION_BUSY")
    del gateway.worker.refusals["Submit"]
    call = gateway.generations.Generate(request)
    await gateway.worker.emit_finish(await gateway.submitted(2))
    assert len(await drain(call)) == 1


async def test_a_rolled_back_turn_runs_anew_and_a_kept_one_is_replayed(gateway: Gateway) -> None:
    for policy, num_turns in (
        (generation_pb2.CANCEL_POLICY_ROLLBACK, 2),
        (generation_pb2.CANCEL_POLICY_KEEP_PARTIAL, 1),
    ):
        before = len(gateway.worker.submits)
        request = generate(await gateway.open(), new_id(), cancel_policy=policy)
        call = gateway.generations.Generate(request)
        generation_id = await gateway.submitted(before + 1)
        await gateway.worker.emit_finish(generation_id, generation_pb2.FINISH_REASON_CANCELLED)
        first = await drain(call)
        again = gateway.generations.Generate(request)
        if num_turns == 2:
            await gateway.worker.emit_finish(await gateway.submitted(before + 2))
        responses = await drain(again)
        assert (responses == first) == (num_turns == 1)
        assert len(gateway.worker.submits) == before + num_turns


async def test_a_retry_waits_for_the_end_of_a_turn_that_is_being_cancelled(gateway: Gateway) -> None:
    """The session is busy until then, and nobody could tell whether it will be rolled back."""
    request = generate(await gateway.open(), new_id())
    gateway.worker.submit_gate.clear()
    call = gateway.generations.Generate(request)
    await gateway.submitted()
    call.cancel()
    await until(lambda: all(turn.is_leaving for turn in gateway.turns._running))
    again = gateway.generations.Generate(request)
    await asyncio.sleep(0.05)
    assert len(gateway.worker.submits) == 1
    gateway.worker.submit_gate.set()
    generation_id = await gateway.submitted(2)
    assert gateway.worker.cancels == [next(iter(gateway.worker.submits))]
    await gateway.worker.emit_finish(generation_id)
    assert (await drain(again))[-1].finished.finish_reason == generation_pb2.FINISH_REASON_EOS


async def test_two_methods_of_the_same_bytes_are_two_requests(gateway: Gateway) -> None:
    fields = {"request_id": new_id(), "session_id": await gateway.open()}
    update, close = session_pb2.UpdateSessionRequest(**fields), session_pb2.CloseSessionRequest(**fields)
    assert update.SerializeToString() == close.SerializeToString()
    await gateway.sessions.UpdateSession(update)
    status, reason, _, _ = await failure(gateway.sessions.CloseSession(close))
    assert (status, reason) == ("ALREADY_EXISTS", "REQUEST_ID_REUSED")
    assert "CloseSession" not in gateway.worker.calls


async def test_an_append_that_was_committed_while_its_caller_left_is_kept(gateway: Gateway) -> None:
    session_id = await gateway.open()
    request = session_pb2.AppendInputRequest(
        request_id=new_id(), session_id=session_id, input=session_pb2.Input(text="abc")
    )
    gateway.worker.append_gate.clear()
    call = gateway.sessions.AppendInput(request)
    await until(lambda: len(gateway.worker.submits) == 1)
    (turn,) = gateway.turns._running
    # The cancel finds nothing: the end is on its way.
    gateway.worker.refusals["Cancel"] = worker_pb2.Refusal(reason="GENERATION_NOT_FOUND", message="none")
    call.cancel()
    await until(lambda: len(gateway.worker.cancels) == 1)
    gateway.worker.cancels.clear()
    gateway.worker.append_gate.set()
    await until(lambda: turn.is_over)
    session = (await gateway.sessions.AppendInput(request)).session
    assert (session.num_tokens, session.revision) == (3, 1)
    assert len(gateway.worker.submits) == 1
