"""What the router makes of turns that end, in the log or in the dark."""

import pytest

from pagecast.v1 import session_pb2
from service import router as router_module
from service.errors import PagecastError, Reason
from service.router import Router
from tests.service.test_router import StubWorker, opened, reason_of


def test_what_a_turn_committed_outlasts_what_is_read_while_the_next_runs() -> None:
    router = Router([StubWorker()])
    opened(router, "s")

    def seen() -> tuple[int, int]:
        snapshot = router.snapshot("s")
        assert snapshot is not None
        return snapshot.revision, snapshot.num_tokens

    router.remember(session_pb2.Session(session_id="s", revision=0, num_tokens=7, labels={"a": "b"}))
    assert seen() == (0, 0)
    router.commit("s", 1, 9)
    router.remember(session_pb2.Session(session_id="s", revision=0, num_tokens=8))  # on its way meanwhile
    assert seen() == (1, 9)
    # One that is read after the next turn's end, in the middle of a third, before that end is told.
    router.remember(session_pb2.Session(session_id="s", revision=2, num_tokens=30))
    router.commit("s", 2, 20)
    router.commit("s", 1, 9)
    assert seen() == (2, 20)
    router.commit("unknown", 1, 1)


def test_a_session_that_is_given_up_has_failed_and_its_worker_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_module, "MAX_FAILED", 2)
    workers = [StubWorker(), StubWorker()]
    router = Router(workers)
    for index in range(8):
        opened(router, f"s{index}")
    for session_id in ("s0", "s2", "s2", "s4", "unknown"):
        router.give_up(session_id)
    with pytest.raises(PagecastError) as caught:
        router.find("s2")
    assert reason_of(caught) is Reason.SESSION_FAILED
    failed = router.failed("s2")
    assert failed is not None
    assert failed.state == session_pb2.SESSION_STATE_FAILED
    # Of the failed ones the oldest is over the limit. What is left in the worker is known to be there.
    assert router.failed("s0") is None
    assert router.held_by(workers[0]) == ["s2", "s4", "s6"]
    router.forget("s2")
    assert [router.place(f"n{index}", "m") is workers[0] for index in range(4)] == [True, True, True, True]
    assert router.find("s6") is workers[0]
