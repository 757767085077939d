import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from pagecast.v1 import model_pb2, session_pb2
from service import router as router_module
from service.errors import MAX_MESSAGE_BYTES, PagecastError, Reason
from service.router import MAX_CLOSED, MAX_CLOSED_BYTES, Router


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


def opened(router: Router[StubWorker], session_id: str, **fields: object) -> StubWorker:
    worker = router.place(session_id, "m")
    router.remember(session_pb2.Session(session_id=session_id, model="m", **fields))  # type: ignore[arg-type]
    return worker


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


def test_a_session_goes_past_workers_that_have_no_place() -> None:
    workers = [StubWorker(), StubWorker(), StubWorker(model_pb2.Model(name="other"))]
    router = Router(workers)
    assert router.place("s0", "m", besides=[workers[0]]) is workers[1]
    assert router.place("s1", "m", besides=[workers[0]]) is workers[1]
    with pytest.raises(PagecastError) as caught:
        router.place("s2", "m", besides=workers[:2])
    assert reason_of(caught) is Reason.NO_WORKER
    assert router.held_by(workers[1]) == ["s0", "s1"]
    assert router.place("s2", "m") is workers[0]


def test_equal_workers_are_told_apart() -> None:
    # Two workers that compare equal, as dataclasses do, still have counts of their own.
    first, second = StubWorker(), StubWorker()
    router = Router([first, second])
    for index in range(4):
        router.place(f"s{index}", "m")
    router.forget("s1")
    assert router.held_by(first) == ["s0", "s2"]
    assert router.held_by(second) == ["s3"]
    assert router.place("s4", "m") is second


def test_lost_workers_get_no_sessions() -> None:
    workers = [StubWorker(), StubWorker()]
    router = Router(workers)
    workers[0].lost.value = True
    assert {id(router.place(f"s{index}", "m")) for index in range(3)} == {id(workers[1])}
    workers[1].lost.value = True
    assert router.models() == []
    for ask in (
        lambda: router.place("s9", "m"),
        lambda: router.link_of_model("m"),
        lambda: router.model("m"),
    ):
        with pytest.raises(PagecastError) as caught:
            ask()
        # It has been served, and will be again.
        assert reason_of(caught) is Reason.NO_WORKER


def test_the_next_worker_takes_new_sessions_only_and_is_not_counted_for_the_old_ones() -> None:
    old, other = StubWorker(), StubWorker()
    router = Router([old, other])
    for index in range(6):
        opened(router, f"s{index}")
    old.lost.value = True
    new = StubWorker()
    router.add(new)
    assert [router.place(f"n{index}", "m") is new for index in range(3)] == [True] * 3
    assert router.link_of_model("m") is not old
    for session_id in ("s0", "s2", "s4"):
        with pytest.raises(PagecastError) as caught:
            router.find(session_id)
        assert reason_of(caught) is Reason.SESSION_FAILED
        assert caught.value.metadata == {"session": session_id}
    assert router.find("s1") is other
    router.forget("s0")
    router.forget("n0")
    assert router.place("n3", "m") is new


def test_a_failed_session_is_as_it_was_last_seen_without_its_kv() -> None:
    worker = StubWorker()
    router = Router([worker])
    opened(
        router, "s", state=session_pb2.SESSION_STATE_ACTIVE, num_tokens=5, num_computed_tokens=4, revision=1
    )
    router.remember(
        session_pb2.Session(
            session_id="s", model="m", state=session_pb2.SESSION_STATE_ACTIVE, num_tokens=9, revision=2,
            num_computed_tokens=8, num_kv_blocks=1, kv_residency=session_pb2.KV_RESIDENCY_DEVICE,
            labels={"a": "b"},
        )
    )  # fmt: skip
    assert router.failed("s") is None
    snapshot = router.snapshot("s")
    assert snapshot is not None
    assert (snapshot.num_tokens, snapshot.num_kv_blocks, snapshot.state) == (
        9, 0, session_pb2.SESSION_STATE_ACTIVE,
    )  # fmt: skip
    worker.lost.value = True
    expected = session_pb2.Session(
        session_id="s", model="m", state=session_pb2.SESSION_STATE_FAILED, num_tokens=9, revision=2,
        kv_residency=session_pb2.KV_RESIDENCY_DROPPED, labels={"a": "b"},
    )  # fmt: skip
    for _ in range(2):  # at once, and after the worker was let go
        assert router.failed("s") == expected
        router.add(StubWorker())
    router.remember(session_pb2.Session(session_id="unknown"))
    assert router.snapshot("unknown") is None


def test_a_failed_session_can_be_closed() -> None:
    worker = StubWorker()
    router = Router([worker])
    opened(router, "s")
    router.place("opening", "m")
    worker.lost.value = True
    session = router.failed("s")
    assert session is not None
    session.state = session_pb2.SESSION_STATE_CLOSED
    router.close(session)
    assert router.failed("s") is None
    assert router.closed("s") == session
    with pytest.raises(PagecastError) as caught:
        router.find("s")
    assert reason_of(caught) is Reason.SESSION_CLOSED
    # One that was never seen is told with what is known.
    assert router.failed("opening") == session_pb2.Session(
        session_id="opening", model="m", state=session_pb2.SESSION_STATE_FAILED,
        kv_residency=session_pb2.KV_RESIDENCY_DROPPED,
    )  # fmt: skip


def test_failed_sessions_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MAX_FAILED", 3)
    router: Router[StubWorker] = Router()
    for round_index in range(3):
        worker = StubWorker()
        router.add(worker)
        for index in range(2):
            opened(router, f"r{round_index}s{index}")
        worker.lost.value = True
    router.add(StubWorker())
    assert [session_id for _, session_id in router.page(None, 10)] == ["r2s1", "r2s0", "r1s1"]
    with pytest.raises(PagecastError) as caught:
        router.find("r0s0")
    assert reason_of(caught) is Reason.SESSION_NOT_FOUND


def test_pages_go_from_the_newest_to_the_oldest() -> None:
    workers = [StubWorker(), StubWorker()]
    router = Router(workers)
    for index in range(7):
        opened(router, f"s{index}")
    router.place("opening", "m")
    router.close(session_pb2.Session(session_id="s3"))
    workers[0].lost.value = True
    pages, before = [], None
    while page := router.page(before, 2):
        pages.append([session_id for _, session_id in page])
        before = page[-1][0]
    assert pages == [["s6", "s5"], ["s4", "s2"], ["s1", "s0"]]


def test_unknown_names() -> None:
    router = Router([StubWorker()])
    with pytest.raises(PagecastError) as caught:
        router.place("s", "x")
    assert reason_of(caught) is Reason.MODEL_NOT_FOUND
    assert caught.value.message == "no such model; served: m"
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


MEASURE = """
import pathlib
from pagecast.v1 import session_pb2
from service.ids import new_session_id
from service.router import MAX_CLOSED, Router

def resident() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

router = Router([])
def close(count):
    for index in range(count):
        session = session_pb2.Session(session_id=new_session_id(), model="m", num_tokens=index)
        session.plan_stats.builds = session.create_time.seconds = session.last_active_time.seconds = index + 1
        router.close(session_pb2.Session.FromString(session.SerializeToString()))

close(1000)
before = resident()
close(MAX_CLOSED - 1000)
print((resident() - before) / (MAX_CLOSED - 1000))
"""


def test_a_closed_session_takes_little_memory() -> None:
    """In a process of its own: a message's memory is none of Python's."""
    measured = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert 0 < float(measured.stdout) < 700


def test_closed_sessions_keep_their_labels_up_to_a_number_of_bytes() -> None:
    router = Router([StubWorker()])
    labels = {f"{index:0256}": "v" * 256 for index in range(64)}
    size = session_pb2.Session(session_id="s1000", labels=labels).ByteSize()
    room = MAX_CLOSED_BYTES // size
    closed = [f"s{index + 1000}" for index in range(room + 5)]
    for session_id in closed:
        for _ in range(2):  # closing one again takes no more room
            router.close(session_pb2.Session(session_id=session_id, labels=labels))
    kept = [session_id for session_id in closed if router.closed(session_id) is not None]
    assert kept == closed[5:]
    last = router.closed(closed[-1])
    assert last is not None
    assert dict(last.labels) == labels


def test_failed_sessions_are_remembered_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MAX_FAILED_BYTES", 5000)
    worker = StubWorker()
    router = Router([worker])
    for index in range(8):
        opened(router, f"s{index}", labels={"a": "b" * 1000})
    worker.lost.value = True
    router.add(StubWorker())
    assert [session_id for _, session_id in router.page(None, 10)] == ["s7", "s6", "s5", "s4"]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["b", "a"], "a, b"),
        ([f"model-{index:02}" for index in range(30)], "model-08, model-09, …"),
        (["é" * 400, "ü"], "é…, …"),
    ],
)
def test_models_that_are_served_are_named_as_far_as_there_is_room(names: list[str], told: str) -> None:
    router = Router([StubWorker(model_pb2.Model(name=name)) for name in names])
    with pytest.raises(PagecastError) as caught:
        router.model("x")
    assert caught.value.message.endswith(told)
    assert len(caught.value.message.encode()) <= MAX_MESSAGE_BYTES
    assert caught.value.metadata == {"model": "x"}
