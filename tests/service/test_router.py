from dataclasses import dataclass, field

import pytest

from pagecast.v1 import model_pb2, session_pb2
from service.errors import PagecastError, Reason
from service.router import MAX_CLOSED, Router


@dataclass
class Lost:
    value: bool = False

    def is_set(self) -> bool:
        return self.value


@dataclass
class StubWorker:
    model: model_pb2.Model = field(default_factory=lambda: model_pb2.Model(name="m"))
    lost: Lost = field(default_factory=Lost)


def reason_of(error: pytest.ExceptionInfo[PagecastError]) -> Reason:
    return error.value.reason


def test_a_session_goes_to_the_worker_with_the_fewest() -> None:
    workers = [StubWorker(), StubWorker(), StubWorker(model_pb2.Model(name="other"))]
    router = Router(workers)
    placed = [router.place(f"s{index}", "m") for index in range(4)]
    assert all(placed[index] is workers[index % 2] for index in range(4))
    router.forget("s0")
    router.forget("s2")
    router.forget("s2")
    assert router.place("s4", "m") is workers[0]
    assert router.place("s5", "m") is workers[0]
    assert router.place("s6", "other") is workers[2]
    assert router.find("s1") is workers[1]


def test_equal_workers_are_told_apart() -> None:
    # Two workers that compare equal, as dataclasses do, still have counts of their own.
    router = Router([StubWorker(), StubWorker()])
    for index in range(4):
        router.place(f"s{index}", "m")
    router.forget("s1")
    assert router._num_sessions == [2, 1]


def test_lost_workers_get_no_sessions() -> None:
    workers = [StubWorker(), StubWorker()]
    router = Router(workers)
    workers[0].lost.value = True
    assert {id(router.place(f"s{index}", "m")) for index in range(3)} == {id(workers[1])}
    workers[1].lost.value = True
    assert router.models() == []
    with pytest.raises(PagecastError) as caught:
        router.place("s9", "m")
    assert reason_of(caught) is Reason.NO_WORKER
    assert router.find("s0") is workers[1]


def test_unknown_names() -> None:
    router = Router([StubWorker()])
    with pytest.raises(PagecastError) as caught:
        router.place("s", "x")
    assert reason_of(caught) is Reason.MODEL_NOT_FOUND
    with pytest.raises(PagecastError) as caught:
        router.find("s")
    assert reason_of(caught) is Reason.SESSION_NOT_FOUND


def test_closed_sessions_are_remembered_up_to_a_number() -> None:
    router = Router([StubWorker()])
    for index in range(MAX_CLOSED + 1):
        router.close(session_pb2.Session(session_id=f"s{index}"))
    assert router.closed("s0") is None
    assert router.closed("s1") is not None
    with pytest.raises(PagecastError) as caught:
        router.find("s1")
    assert reason_of(caught) is Reason.SESSION_CLOSED
