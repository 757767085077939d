"""S7 over gRPC: a request id makes every mutating call one call, however often it is sent."""

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from pagecast.v1 import session_pb2
from tests.e2e.calls import ENDLESS, Api, Refusal, refusal_of
from tests.e2e.processes import wait_until
from tests.e2e.rig import Rig

pytestmark = pytest.mark.e2e
REUSED = Refusal(grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED", "request_id")
# Many enough for a turn to be cut.
NUM_TOKENS = 500
WARM = {"sampling": {"temperature": 1.0}, "max_tokens": 15}


def new_id() -> str:
    return str(uuid.uuid4())


def count_sessions(api: Api) -> int:
    return len(api.sessions.ListSessions(session_pb2.ListSessionsRequest(page_size=1000)).sessions)


def test_s07_a_retry_of_a_turn_gets_its_tokens_and_runs_nothing(rig: Rig, api: Api) -> None:
    """Unseeded: a second run would say something else."""
    request_id = new_id()
    with api.session() as session_id:
        first = api.turn(session_id, "once", request_id=request_id, **WARM)
        num_steps = rig.workers["plain"].info().num_steps
        again = api.turn(session_id, "once", request_id=request_id.upper(), **WARM)
        assert (again.ids, again.text, again.started) == (first.ids, first.text, first.started)
        assert again.finished == first.finished
        assert rig.workers["plain"].info().num_steps == num_steps
        assert api.get(session_id).revision == 1
        other = api.turn(session_id, "once", request_id=new_id(), **WARM)
        assert other.started.generation_id != first.started.generation_id


def test_s07_retries_at_once_are_one_turn(api: Api) -> None:
    request_id = new_id()
    with api.session() as session_id, ThreadPoolExecutor(6) as threads:
        replies = list(
            threads.map(lambda _: api.turn(session_id, "once", request_id=request_id, **WARM), range(6))
        )
        assert len({tuple(reply.ids) for reply in replies}) == 1
        assert len({reply.started.generation_id for reply in replies}) == 1
        assert api.get(session_id).revision == 1


def test_s07_a_retry_follows_the_turn_that_runs(api: Api) -> None:
    """The first caller leaves, the second has the whole turn."""
    request_id = new_id()
    asked: dict[str, Any] = {"max_tokens": NUM_TOKENS, "request_id": request_id}
    with api.session() as session_id:
        expected = api.said([5, 6], max_tokens=NUM_TOKENS)
        first = api.stream(session_id, [5, 6], **asked)
        first.read_tokens(1)
        second = api.stream(session_id, [5, 6], **asked)
        second.read_tokens(1)
        first.call.cancel()
        assert second.reply().ids == expected
        assert api.get(session_id).revision == 1


def test_s07_a_turn_that_was_rolled_back_runs_anew(api: Api) -> None:
    request_id = new_id()
    asked: dict[str, Any] = {"max_tokens": NUM_TOKENS, "request_id": request_id}
    with api.session() as session_id:
        cancelled = api.stream(session_id, [5, 6], **asked)
        generation_id = cancelled.read_tokens(1)
        api.cancel(session_id, generation_id)
        assert cancelled.reply().end == "CANCELLED"
        left = api.stream(session_id, [5, 6], **asked)
        assert left.read_tokens(1) != generation_id
        left.call.cancel()
        wait_until(lambda: api.get(session_id).num_tokens == 0, 10.0)
        reply = api.turn(session_id, [5, 6], **asked)
        assert (reply.end, len(reply.ids), reply.finished.revision) == ("MAX_TOKENS", NUM_TOKENS, 1)
        assert api.turn(session_id, [5, 6], **asked).started == reply.started


def test_s07_opening_appending_updating_and_closing_are_done_once(api: Api) -> None:
    ids = {name: new_id() for name in ("open", "append", "update", "close")}
    num_sessions = count_sessions(api)
    calls: dict[str, Callable[[str], session_pb2.Session | str]] = {
        "open": lambda _: api.open(request_id=ids["open"], labels={"a": "b"}),
        "append": lambda name: api.append(name, [5] * 20, request_id=ids["append"]),
        "update": lambda name: api.update(name, labels={"c": "d"}, request_id=ids["update"]),
        "close": lambda name: api.close(name, request_id=ids["close"]),
    }
    session_id = api.open(request_id=ids["open"], labels={"a": "b"})
    with ThreadPoolExecutor(5) as threads:
        for name, call in calls.items():
            answers = list(threads.map(call, [session_id] * 5))
            assert all(answer == answers[0] for answer in answers), name
            if name == "append":
                # What comes between does not change a first answer.
                api.append(session_id, [6])
                assert call(session_id) == answers[0]
                assert (api.get(session_id).num_tokens, api.get(session_id).revision) == (21, 2)
            if name in ("open", "append", "update"):
                assert count_sessions(api) == num_sessions + 1
    assert count_sessions(api) == num_sessions


def test_s07_an_id_with_another_payload_is_refused_and_changes_nothing(api: Api) -> None:
    with api.session() as session_id:
        request_id = new_id()
        api.turn(session_id, "once", request_id=request_id, **WARM)
        before = api.get(session_id)
        calls: list[Callable[[], object]] = [
            lambda: api.turn(session_id, "twice", request_id=request_id, **WARM),
            lambda: api.turn(session_id, "once", request_id=request_id, sampling={"seed": 4}, max_tokens=15),
            lambda: api.append(session_id, "once", request_id=request_id),
            lambda: api.update(session_id, request_id=request_id),
            lambda: api.open(request_id=request_id),
            lambda: api.cancel(session_id, "gen_" + "a" * 26, request_id=request_id),
            lambda: api.close(session_id, request_id=request_id),
        ]
        for call in calls:
            assert refusal_of(call) == REUSED
        assert api.get(session_id) == before


def test_s07_a_refused_call_leaves_no_record(api: Api) -> None:
    """The same id and payload once more, when there is nothing in its way."""
    request_id = new_id()
    with api.session() as session_id:
        stream = api.stream(session_id, [5], max_tokens=ENDLESS)
        generation_id = stream.read_tokens(1)
        asked: dict[str, Any] = {"max_tokens": 3, "request_id": request_id}
        assert refusal_of(lambda: api.turn(session_id, [6], **asked)).reason == "SESSION_BUSY"
        cancel_id = new_id()
        api.cancel(session_id, generation_id, request_id=cancel_id)
        assert stream.reply().end == "CANCELLED"
        # The cancel's retry gets the cancel's answer; without its id there is nothing left to cancel.
        api.cancel(session_id, generation_id, request_id=cancel_id)
        assert refusal_of(lambda: api.cancel(session_id, generation_id)).reason == "GENERATION_NOT_FOUND"
        assert len(api.turn(session_id, [6], **asked).ids) == 3
