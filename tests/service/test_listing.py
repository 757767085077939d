import pytest

from pagecast.v1 import session_pb2
from tests.service.conftest import Gateway, MakeGateway, failure


async def list_all(gateway: Gateway, size: int | None) -> list[list[str]]:
    pages, token = [], ""
    while True:
        request = session_pb2.ListSessionsRequest(page_size=size, page_token=token)
        response = await gateway.sessions.ListSessions(request)
        pages.append([session.session_id for session in response.sessions])
        token = response.next_page_token
        if not token:
            return pages


async def test_lists_newest_first_a_page_at_a_time_with_live_numbers(make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(2)
    assert await list_all(gateway, None) == [[]]
    opened = [await gateway.open() for _ in range(7)]
    newest_first = opened[::-1]
    assert await list_all(gateway, None) == [newest_first]
    assert await list_all(gateway, 3) == [newest_first[:3], newest_first[3:6], newest_first[6:]]
    assert await list_all(gateway, 7) == [newest_first]
    gateway.workers[0].sessions[opened[0]].num_tokens = 9
    sessions = (await gateway.sessions.ListSessions(session_pb2.ListSessionsRequest())).sessions
    assert sessions[-1].num_tokens == 9
    # Each page asks each worker of its sessions once; the last of three holds one session.
    assert [worker.calls.count("BatchGetSessions") for worker in gateway.workers] == [6, 5]


async def test_pages_go_on_where_they_left_off_when_sessions_come_and_go(gateway: Gateway) -> None:
    opened = [await gateway.open() for _ in range(6)]
    first = await gateway.sessions.ListSessions(session_pb2.ListSessionsRequest(page_size=2))
    await gateway.sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=opened[3]))
    del gateway.worker.sessions[opened[2]], gateway.worker.sessions[opened[1]]  # unknown to the worker
    await gateway.open()
    request = session_pb2.ListSessionsRequest(page_size=2, page_token=first.next_page_token)
    second = await gateway.sessions.ListSessions(request)
    # Two that vanished would be a page; the one behind them is not left to an empty one's successor.
    assert [session.session_id for session in second.sessions] == [opened[0]]
    assert second.next_page_token == ""


async def test_workers_that_do_not_answer_are_shown_as_last_seen(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.listing.READ_TIMEOUT_S", 0.1)
    gateway = await make_gateway(2)
    opened = [await gateway.open(), await gateway.open()]
    gateway.workers[0].batch_gate.clear()
    assert await list_all(gateway, None) == [opened[::-1]]


@pytest.mark.parametrize("change", ["", "x", "é", "A" * 500])
async def test_a_page_token_that_nobody_gave_out_is_refused(gateway: Gateway, change: str) -> None:
    for _ in range(2):
        await gateway.open()
    first = await gateway.sessions.ListSessions(session_pb2.ListSessionsRequest(page_size=1))
    good = first.next_page_token
    bad = good + change if change else ("B" if good[0] == "A" else "A") + good[1:]
    call = gateway.sessions.ListSessions(session_pb2.ListSessionsRequest(page_token=bad))
    status, reason, metadata, _ = await failure(call)
    assert (status, reason, metadata) == ("INVALID_ARGUMENT", "FIELD_INVALID", {"field": "page_token"})
