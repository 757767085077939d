import asyncio
from typing import Any

import pytest

from pagecast.v1 import generation_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from service.ids import SESSION_ID, new_session_id
from service.pool.link import WorkerLink
from tests.service.conftest import Gateway, MakeGateway, failure, until


async def test_open_draws_an_id_and_passes_fields_on(gateway: Gateway) -> None:
    request = session_pb2.OpenSessionRequest(
        model="tiny",
        decode_plan=session_pb2.PAGED_DECODE_PLAN_REPLAN,
        max_context_tokens=64,
        default_sampling=session_pb2.SamplingParams(temperature=1.0),
        priority=-3,
        labels={"team": "a"},
    )
    session = (await gateway.sessions.OpenSession(request)).session
    assert SESSION_ID.fullmatch(session.session_id)
    assert session == gateway.worker.sessions[session.session_id]
    assert session.decode_plan == session_pb2.PAGED_DECODE_PLAN_REPLAN
    assert session.max_context_tokens == 64
    assert session.priority == -3
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


async def test_update_changes_plan_priority_and_labels(gateway: Gateway) -> None:
    session_id = await gateway.open()
    request = session_pb2.UpdateSessionRequest(
        session_id=session_id, decode_plan=session_pb2.PAGED_DECODE_PLAN_REPLAN, labels={"a": "b"}, priority=0
    )
    gateway.worker.sessions[session_id].priority = 5
    session = (await gateway.sessions.UpdateSession(request)).session
    assert session.priority == 0
    assert session.decode_plan == session_pb2.PAGED_DECODE_PLAN_REPLAN
    assert dict(session.labels) == {"a": "b"}


async def test_close_is_idempotent_and_ends_the_session(gateway: Gateway) -> None:
    opened = session_pb2.OpenSessionRequest(model="tiny", labels={"team": "a"})
    session_id = (await gateway.sessions.OpenSession(opened)).session.session_id
    request = session_pb2.CloseSessionRequest(session_id=session_id)
    first = (await gateway.sessions.CloseSession(request)).session
    second = (await gateway.sessions.CloseSession(request)).session
    assert first == second
    assert first.state == session_pb2.SESSION_STATE_CLOSED
    read = await gateway.sessions.GetSession(session_pb2.GetSessionRequest(session_id=session_id))
    assert read.session == first
    assert dict(read.session.labels) == {"team": "a"}
    listed = await gateway.sessions.ListSessions(session_pb2.ListSessionsRequest())
    assert list(listed.sessions) == []
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
        assert metadata == {"session": session_id, "field": "session_id"}


async def test_a_refused_open_leaves_nothing(gateway: Gateway) -> None:
    gateway.worker.refusals["OpenSession"] = worker_pb2.Refusal(
        reason="FIELD_OUT_OF_RANGE", field="max_context_tokens", message="over the model's"
    )
    request = session_pb2.OpenSessionRequest(model="tiny", max_context_tokens=10**6)
    status, reason, metadata, _ = await failure(gateway.sessions.OpenSession(request))
    assert (status, reason) == ("INVALID_ARGUMENT", "FIELD_OUT_OF_RANGE")
    assert metadata == {"field": "max_context_tokens"}
    assert gateway.router._num_sessions == {id(gateway.links[0]): 0}


async def test_a_client_that_leaves_during_open_leaves_no_session(gateway: Gateway) -> None:
    gateway.worker.open_gate.clear()
    call = gateway.sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"))
    await until(lambda: gateway.router._num_sessions[id(gateway.links[0])] == 1)
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: gateway.router._num_sessions[id(gateway.links[0])] == 0)
    gateway.worker.open_gate.set()
    await until(lambda: not gateway.links[0]._background)
    assert gateway.worker.sessions == {}


def append(session_id: str, text: str = "abc", **fields: Any) -> session_pb2.AppendInputRequest:
    return session_pb2.AppendInputRequest(session_id=session_id, input=session_pb2.Input(text=text), **fields)


async def test_append_answers_with_the_session_once_its_kv_is_there(gateway: Gateway) -> None:
    session_id = await gateway.open()
    gateway.worker.append_gate.clear()
    call = gateway.sessions.AppendInput(append(session_id, expected_revision=0))
    submit = gateway.worker.submits[await gateway.submitted()]
    await asyncio.sleep(0.05)
    assert not call.done()
    assert submit.append_only
    assert submit.HasField("expected_revision")
    assert submit.cancel_policy == generation_pb2.CANCEL_POLICY_ROLLBACK
    gateway.worker.append_gate.set()
    session = (await call).session
    assert (session.num_tokens, session.revision) == (3, 1)
    assert gateway.router.snapshot(session_id).revision == 1


async def test_a_caller_who_leaves_an_append_cancels_it(gateway: Gateway) -> None:
    session_id = await gateway.open()
    gateway.worker.append_gate.clear()
    call = gateway.sessions.AppendInput(append(session_id))
    generation_id = await gateway.submitted()
    call.cancel()
    await until(lambda: gateway.worker.cancels == [generation_id])
    await until(lambda: gateway.turns.num_running == 0)
    assert gateway.worker.sessions[session_id].num_tokens == 0
    gateway.worker.append_gate.set()
    assert (await gateway.sessions.AppendInput(append(session_id))).session.num_tokens == 3


async def test_an_append_that_is_cancelled_by_others_says_so(gateway: Gateway) -> None:
    gateway.worker.append_gate.clear()
    call = gateway.sessions.AppendInput(append(await gateway.open()))
    cancelled = generation_pb2.FINISH_REASON_CANCELLED
    await gateway.worker.emit_finish(await gateway.submitted(), cancelled)
    status, reason, _, _ = await failure(call)
    assert (status, reason) == ("CANCELLED", "CANCELLED")


@pytest.mark.parametrize("reason", ["SESSION_BUSY", "REVISION_MISMATCH", "PROMPT_TOO_LONG"])
async def test_a_refused_append_is_told(gateway: Gateway, reason: str) -> None:
    gateway.worker.refusals["Submit"] = worker_pb2.Refusal(reason=reason, message="no")
    _, told, _, _ = await failure(gateway.sessions.AppendInput(append(await gateway.open())))
    assert told == reason


def with_input(text: str = "abc") -> session_pb2.OpenSessionRequest:
    return session_pb2.OpenSessionRequest(model="tiny", initial_input=session_pb2.Input(text=text))


async def test_open_with_initial_input_answers_with_it_computed(gateway: Gateway) -> None:
    session = (await gateway.sessions.OpenSession(with_input())).session
    assert (session.num_tokens, session.revision) == (3, 1)


async def test_an_open_whose_input_is_refused_leaves_no_session(gateway: Gateway) -> None:
    gateway.worker.refusals["Submit"] = worker_pb2.Refusal(
        reason="PROMPT_TOO_LONG",
        field="input.text",
        message="input.text is too long",
        metadata={"limit": "2"},
    )
    status, reason, metadata, whole = await failure(gateway.sessions.OpenSession(with_input()))
    assert whole.message == "initial_input.text is too long"
    assert (status, reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert metadata == {"field": "initial_input.text", "limit": "2"}
    await until(lambda: not gateway.worker.sessions)
    assert gateway.router.page(None, 10) == []


async def test_a_client_that_leaves_during_the_initial_input_leaves_no_session(gateway: Gateway) -> None:
    gateway.worker.append_gate.clear()
    call = gateway.sessions.OpenSession(with_input())
    await gateway.submitted()
    assert (await gateway.sessions.ListSessions(session_pb2.ListSessionsRequest())).sessions == []
    call.cancel()
    await until(lambda: not gateway.worker.sessions)
    await until(lambda: gateway.turns.num_running == 0)


async def test_an_open_goes_on_to_another_worker_when_one_died(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A call over a broken connection then ends before its worker is known to be lost.
    monkeypatch.setattr("service.pool.link.FATE_S", 0.01)
    gateway = await make_gateway(3)
    for worker in gateway.workers[:2]:
        await worker.die()
    opening = asyncio.create_task(gateway.open())
    for link in gateway.links[:2]:
        await asyncio.sleep(0.1)
        assert not opening.done()
        lose(link)  # as the end of its process tells
    session_id = await opening
    assert list(gateway.workers[2].sessions) == [session_id]
    lose(gateway.links[2])
    status, reason, _, _ = await failure(gateway.open())
    assert (status, reason) == ("UNAVAILABLE", "NO_WORKER")


def lose(link: WorkerLink) -> None:
    link._hang("as the test says")


async def test_sessions_of_a_lost_worker_are_failed_and_can_be_closed(make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(2)
    lost, kept = await gateway.open(), await gateway.open()
    await gateway.sessions.UpdateSession(session_pb2.UpdateSessionRequest(session_id=lost, priority=7))
    lose(gateway.links[0])
    get = session_pb2.GetSessionRequest(session_id=lost)
    session = (await gateway.sessions.GetSession(get)).session
    assert (session.state, session.priority) == (session_pb2.SESSION_STATE_FAILED, 7)
    for call in (
        gateway.sessions.UpdateSession(session_pb2.UpdateSessionRequest(session_id=lost)),
        gateway.sessions.AppendInput(append(lost)),
        gateway.generate(lost).read(),
    ):
        status, reason, metadata, _ = await failure(call)
        assert (status, reason) == ("FAILED_PRECONDITION", "SESSION_FAILED")
        assert metadata == {"session": lost, "field": "session_id"}
    listed = (await gateway.sessions.ListSessions(session_pb2.ListSessionsRequest())).sessions
    assert [(each.session_id, each.state) for each in listed] == [
        (kept, session_pb2.SESSION_STATE_ACTIVE),
        (lost, session_pb2.SESSION_STATE_FAILED),
    ]
    for _ in range(2):
        closed = await gateway.sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=lost))
        assert closed.session.state == session_pb2.SESSION_STATE_CLOSED
    assert (await gateway.sessions.GetSession(get)).session.state == session_pb2.SESSION_STATE_CLOSED
    status, reason, _, _ = await failure(gateway.generate(lost).read())
    assert (status, reason) == ("FAILED_PRECONDITION", "SESSION_CLOSED")


@pytest.mark.parametrize(("name", "state"), [("GetSession", "FAILED"), ("CloseSession", "CLOSED")])
async def test_a_worker_that_dies_during_the_call(gateway: Gateway, name: str, state: str) -> None:
    session_id = await gateway.open()
    # The connection breaks first; the link learns that the worker is lost while the call waits.
    await gateway.worker.die()
    request = getattr(session_pb2, f"{name}Request")(session_id=session_id)
    call = getattr(gateway.sessions, name)(request)
    await asyncio.sleep(0.1)
    lose(gateway.links[0])
    session = (await call).session
    assert session_pb2.SessionState.Name(session.state) == f"SESSION_STATE_{state}"


@pytest.mark.parametrize(
    "name",
    ["ForkSession", "TruncateSession", "SuspendSession", "ResumeSession"],
)
async def test_rpcs_of_later_versions_say_so(gateway: Gateway, name: str) -> None:
    request = getattr(session_pb2, f"{name}Request")()
    status, reason, metadata, _ = await failure(getattr(gateway.sessions, name)(request))
    assert (status, reason, metadata) == ("UNIMPLEMENTED", "NOT_IMPLEMENTED", {"rpc": name})


async def test_attach_says_that_it_is_of_a_later_version(gateway: Gateway) -> None:
    call = gateway.generations.AttachGeneration(generation_pb2.AttachGenerationRequest())
    status, reason, metadata, _ = await failure(call.read())
    assert (status, reason, metadata) == ("UNIMPLEMENTED", "NOT_IMPLEMENTED", {"rpc": "AttachGeneration"})
