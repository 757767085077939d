import asyncio

import pytest

from pagecast.v1 import generation_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from service.ids import SESSION_ID, new_session_id
from tests.service.conftest import Gateway, MakeGateway, failure, until


async def test_open_draws_an_id_and_passes_fields_on(gateway: Gateway) -> None:
    request = session_pb2.OpenSessionRequest(
        model="tiny",
        decode_plan=session_pb2.PAGED_DECODE_PLAN_REPLAN,
        max_context_tokens=64,
        default_sampling=session_pb2.SamplingParams(temperature=1.0),
        labels={"team": "a"},
    )
    session = (await gateway.sessions.OpenSession(request)).session
    assert SESSION_ID.fullmatch(session.session_id)
    assert session == gateway.worker.sessions[session.session_id]
    assert session.decode_plan == session_pb2.PAGED_DECODE_PLAN_REPLAN
    assert session.max_context_tokens == 64
    assert dict(session.labels) == {"team": "a"}


async def test_sessions_spread_over_workers_even_when_opened_at_once(make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(2)
    await asyncio.gather(*(gateway.open() for _ in range(6)))
    assert [len(worker.sessions) for worker in gateway.workers] == [3, 3]


async def test_calls_reach_the_worker_that_holds_the_session(make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(2)
    for session_id in [await gateway.open(), await gateway.open()]:
        response = await gateway.sessions.GetSession(session_pb2.GetSessionRequest(session_id=session_id))
        assert response.session.session_id == session_id


async def test_update_changes_plan_and_labels(gateway: Gateway) -> None:
    session_id = await gateway.open()
    request = session_pb2.UpdateSessionRequest(
        session_id=session_id, decode_plan=session_pb2.PAGED_DECODE_PLAN_REPLAN, labels={"a": "b"}
    )
    session = (await gateway.sessions.UpdateSession(request)).session
    assert session.decode_plan == session_pb2.PAGED_DECODE_PLAN_REPLAN
    assert dict(session.labels) == {"a": "b"}


async def test_close_is_idempotent_and_ends_the_session(gateway: Gateway) -> None:
    session_id = await gateway.open()
    request = session_pb2.CloseSessionRequest(session_id=session_id)
    first = (await gateway.sessions.CloseSession(request)).session
    second = (await gateway.sessions.CloseSession(request)).session
    assert first == second
    assert first.state == session_pb2.SESSION_STATE_CLOSED
    read = await gateway.sessions.GetSession(session_pb2.GetSessionRequest(session_id=session_id))
    assert read.session == first
    status, reason, _, _ = await failure(gateway.generate(session_id).read())
    assert (status, reason) == ("FAILED_PRECONDITION", "SESSION_CLOSED")


async def test_two_closes_at_once_answer_the_same(gateway: Gateway) -> None:
    session_id = await gateway.open()
    request = session_pb2.CloseSessionRequest(session_id=session_id)
    first, second = await asyncio.gather(*(gateway.sessions.CloseSession(request) for _ in range(2)))
    assert first == second


async def test_unknown_sessions_are_not_found(gateway: Gateway) -> None:
    session_id = new_session_id()
    calls = [
        gateway.sessions.GetSession(session_pb2.GetSessionRequest(session_id=session_id)),
        gateway.sessions.UpdateSession(session_pb2.UpdateSessionRequest(session_id=session_id)),
        gateway.sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=session_id)),
        gateway.generate(session_id).read(),
    ]
    for call in calls:
        status, reason, metadata, _ = await failure(call)
        assert (status, reason) == ("NOT_FOUND", "SESSION_NOT_FOUND")
        assert metadata == {"session": session_id}


async def test_a_refused_open_leaves_nothing(gateway: Gateway) -> None:
    gateway.worker.refusals["OpenSession"] = worker_pb2.Refusal(
        reason="FIELD_OUT_OF_RANGE", field="max_context_tokens", message="over the model's"
    )
    request = session_pb2.OpenSessionRequest(model="tiny", max_context_tokens=10**6)
    status, reason, metadata, _ = await failure(gateway.sessions.OpenSession(request))
    assert (status, reason) == ("INVALID_ARGUMENT", "FIELD_OUT_OF_RANGE")
    assert metadata == {"field": "max_context_tokens"}
    assert gateway.router._num_sessions == [0]


async def test_a_client_that_leaves_during_open_leaves_no_session(gateway: Gateway) -> None:
    gateway.worker.open_gate.clear()
    call = gateway.sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))
    await until(lambda: gateway.router._num_sessions == [1])
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: gateway.router._num_sessions == [0])
    gateway.worker.open_gate.set()
    await until(lambda: not gateway.links[0]._background)
    assert gateway.worker.sessions == {}


@pytest.mark.parametrize(
    "name",
    ["ListSessions", "AppendInput", "ForkSession", "TruncateSession", "SuspendSession", "ResumeSession"],
)
async def test_rpcs_of_later_versions_say_so(gateway: Gateway, name: str) -> None:
    request = getattr(session_pb2, f"{name}Request")()
    status, reason, metadata, _ = await failure(getattr(gateway.sessions, name)(request))
    assert (status, reason, metadata) == ("UNIMPLEMENTED", "NOT_IMPLEMENTED", {"rpc": name})


async def test_attach_says_that_it_is_of_a_later_version(gateway: Gateway) -> None:
    call = gateway.generations.AttachGeneration(generation_pb2.AttachGenerationRequest())
    status, reason, metadata, _ = await failure(call.read())
    assert (status, reason, metadata) == ("UNIMPLEMENTED", "NOT_IMPLEMENTED", {"rpc": "AttachGeneration"})
