"""What the router knows of a session after its turns: committed lengths, and turns whose end nobody knows."""

from typing import Any

from pagecast.v1 import generation_pb2, session_pb2
from tests.service.conftest import Gateway, drain, failure, until
from tests.service.test_replays import generate, new_id


async def read(gateway: Gateway, session_id: str) -> session_pb2.Session:
    response = await gateway.sessions.GetSession(session_pb2.GetSessionRequest(session_id=session_id))
    session: session_pb2.Session = response.session
    return session


async def test_a_failed_session_has_its_committed_length(gateway: Gateway) -> None:
    """Reads in the middle of turns show running lengths, and leave none behind."""
    session_id = await gateway.open()
    live = gateway.worker.sessions[session_id]
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted()
    live.num_tokens = 4
    assert (await read(gateway, session_id)).num_tokens == 4
    await gateway.worker.emit_finish(generation_id, num_tokens=5)
    await drain(call)
    # The next one is rolled back.
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted(2)
    live.revision, live.num_tokens = 1, 9
    assert (await read(gateway, session_id)).num_tokens == 9
    await gateway.worker.emit_finish(generation_id, generation_pb2.FINISH_REASON_CANCELLED, num_tokens=5)
    await drain(call)
    gateway.links[0]._hang("as the test says")
    left = await read(gateway, session_id)
    assert left.state == session_pb2.SESSION_STATE_FAILED
    assert (left.revision, left.num_tokens) == (1, 5)


async def miss_reports(gateway: Gateway, generation_id: str) -> None:
    """Let the worker's reports go on while nobody reads them, until the next one is not kept."""
    await gateway.worker.emit_token(generation_id, 0)
    await until(lambda: gateway.links[0]._steps.last_report >= 1)
    await gateway.worker.cut_streams()
    gateway.worker.first_kept = gateway.links[0]._steps.last_report + 2
    await gateway.worker.emit_finish(generation_id)
    await gateway.worker.emit_finish("another")


async def failed(call: Any) -> tuple[str, str]:
    status, reason, _, _ = await failure(call)
    return status, reason


async def test_a_turn_whose_end_nobody_knows_fails_its_session(gateway: Gateway) -> None:
    """It may be committed: a retry that ran it again would double it."""
    session_id, idle = await gateway.open(), await gateway.open()
    request = generate(session_id, new_id())
    call = gateway.generations.Generate(request)
    await miss_reports(gateway, await gateway.submitted())
    assert await failed(drain(call)) == ("UNAVAILABLE", "WORKER_LOST")
    retried = drain(gateway.generations.Generate(request))
    assert await failed(retried) == ("FAILED_PRECONDITION", "SESSION_FAILED")
    assert len(gateway.worker.submits) == 1
    # The worker is there, and keeps nothing of it; a session without a turn goes on.
    await until(lambda: list(gateway.worker.sessions) == [idle])
    assert (await read(gateway, session_id)).state == session_pb2.SESSION_STATE_FAILED
    assert (await read(gateway, idle)).state == session_pb2.SESSION_STATE_ACTIVE
    await until(lambda: gateway.links[0]._steps.last_report >= 3)
    assert not gateway.links[0].lost.is_set()
    close = session_pb2.CloseSessionRequest(session_id=session_id)
    closed = (await gateway.sessions.CloseSession(close)).session
    assert closed.state == session_pb2.SESSION_STATE_CLOSED


async def test_a_turn_does_not_go_on_behind_reports_that_it_missed(gateway: Gateway) -> None:
    """What is still kept of it comes again, while its Submit is not answered yet."""
    session_id = await gateway.open()
    gateway.worker.submit_gate.clear()
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted()
    await miss_reports(gateway, generation_id)
    await gateway.worker.emit_token(generation_id, 7)
    await until(lambda: gateway.links[0]._steps.last_report == 4)
    gateway.worker.submit_gate.set()
    assert [token.id for token in (await call.read()).chunk.tokens] == [0]
    assert await failed(call.read()) == ("UNAVAILABLE", "WORKER_LOST")


async def test_an_append_whose_end_nobody_knows_fails_its_session(gateway: Gateway) -> None:
    session_id = await gateway.open()
    gateway.worker.append_gate.clear()
    request = session_pb2.AppendInputRequest(
        request_id=new_id(), session_id=session_id, input=session_pb2.Input(text="abc")
    )
    call = gateway.sessions.AppendInput(request)
    await miss_reports(gateway, await gateway.submitted())
    assert await failed(call) == ("UNAVAILABLE", "WORKER_LOST")
    retried = gateway.sessions.AppendInput(request)
    assert await failed(retried) == ("FAILED_PRECONDITION", "SESSION_FAILED")
    await until(lambda: gateway.worker.sessions == {})


async def test_sessions_are_opened_in_the_name_of_their_link(gateway: Gateway) -> None:
    session_id = await gateway.open()
    assert gateway.worker.owners == {session_id: gateway.links[0].owner_id}


async def test_a_link_whose_sessions_the_worker_closed_is_lost(gateway: Gateway) -> None:
    """Its worker is there and answers: the next link is a new owner."""
    session_id = await gateway.open()
    gateway.worker.is_owner_gone = True
    await gateway.worker.cut_streams()
    await until(gateway.links[0].lost.is_set)
    assert not gateway.links[0].is_hung
    assert (await read(gateway, session_id)).state == session_pb2.SESSION_STATE_FAILED
