"""Deadlines of calls that share a run under one request id (S7)."""

import asyncio

import grpc
import pytest

from pagecast.v1 import session_pb2
from tests.service.conftest import Gateway, drain, until
from tests.service.test_replays import STARTED, generate, new_id


async def test_the_deadline_of_the_first_caller_is_not_that_of_the_second(gateway: Gateway) -> None:
    """The turn goes on for whoever is left: one start, and each token once."""
    gateway.worker.drops_late = True
    request = generate(await gateway.open(), new_id())
    first = gateway.generations.Generate(request, timeout=0.3)
    generation_id = await gateway.submitted()
    second = gateway.generations.Generate(request)
    await gateway.worker.emit(generation_id, started=STARTED)
    assert (await second.read()).HasField("started")
    with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
        await drain(first)
    await asyncio.sleep(0.05)
    await gateway.worker.emit_token(generation_id, 0)
    await gateway.worker.emit_finish(generation_id)
    assert [token.id for token in (await second.read()).chunk.tokens] == [0]
    assert (await second.read()).HasField("finished")
    assert not gateway.worker.submits[generation_id].HasField("deadline")
    assert (len(gateway.worker.submits), gateway.worker.cancels) == (1, [])


@pytest.mark.parametrize("name", ["AppendInput", "OpenSession"])
@pytest.mark.parametrize("has_request_id", [True, False])
async def test_input_that_others_wait_for_too_has_no_deadline_in_the_worker(
    gateway: Gateway, name: str, *, has_request_id: bool
) -> None:
    source, fields = session_pb2.Input(text="abc"), {"request_id": new_id()} if has_request_id else {}
    gateway.worker.append_gate.clear()
    if name == "AppendInput":
        session_id = await gateway.open()
        request = session_pb2.AppendInputRequest(session_id=session_id, input=source, **fields)
    else:
        request = session_pb2.OpenSessionRequest(model="tiny", initial_input=source, **fields)
    call = getattr(gateway.sessions, name)
    first = call(request, timeout=0.3)
    submit = gateway.worker.submits[await gateway.submitted()]
    assert submit.HasField("deadline") is not has_request_id
    second = call(request) if has_request_id else None
    with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
        await first
    if second is None:
        await until(lambda: gateway.worker.cancels == [submit.generation_id])
        return
    await asyncio.sleep(0.05)
    gateway.worker.append_gate.set()
    assert (await second).session.num_tokens == 3
    assert (len(gateway.worker.submits), gateway.worker.cancels) == (1, [])


async def test_the_last_deadline_ends_a_turn_under_a_request_id(gateway: Gateway) -> None:
    request = generate(await gateway.open(), new_id())
    calls = [gateway.generations.Generate(request, timeout=timeout_s) for timeout_s in (0.2, 0.4)]
    generation_id = await gateway.submitted()
    for call in calls:
        assert gateway.worker.cancels == []
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await drain(call)
    await until(lambda: gateway.worker.cancels == [generation_id])
    assert len(gateway.worker.submits) == 1
