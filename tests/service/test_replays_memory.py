"""The memory of first answers by itself; retries over gRPC are in test_replays."""

import asyncio

from pagecast.v1 import session_pb2
from service.errors import PagecastError, Reason
from service.ids import new_session_id
from service.replays import Replays
from tests.service.test_replays import new_id

SESSION = new_session_id()


def update(request_id: str, text: str = "") -> session_pb2.UpdateSessionRequest:
    return session_pb2.UpdateSessionRequest(request_id=request_id, session_id=SESSION, labels={"t": text})


class Counted:
    def __init__(self, size_bytes: int = 0) -> None:
        self.count = 0
        self._text = "x" * size_bytes

    async def __call__(self) -> session_pb2.UpdateSessionResponse:
        self.count += 1
        await asyncio.sleep(0)
        return session_pb2.UpdateSessionResponse(session=session_pb2.Session(model=self._text))


async def test_the_least_recently_used_record_goes_first() -> None:
    replays, run = Replays(max_records=2), Counted()
    first, second, third = new_id(), new_id(), new_id()
    for request_id in (first, second, first, third, first):
        await replays.answer("UpdateSession", update(request_id), run)
    assert run.count == 3
    await replays.answer("UpdateSession", update(second), run)
    assert run.count == 4


async def test_records_are_bounded_in_bytes() -> None:
    replays, run = Replays(max_bytes=100_000), Counted(size_bytes=10_000)
    ids = [new_id() for _ in range(30)]
    for request_id in ids:
        await replays.answer("UpdateSession", update(request_id), run)
    assert len(replays._kept) == 9
    assert replays._num_bytes == sum(record.size_bytes for record in replays._kept.values()) <= 100_000
    await replays.answer("UpdateSession", update(ids[-1]), run)
    assert run.count == 30
    await replays.answer("UpdateSession", update(new_id()), Counted(size_bytes=200_000))
    assert (len(replays._kept), replays._num_bytes) == (0, 0)


async def test_a_failed_call_leaves_no_record_and_no_leak() -> None:
    replays, run = Replays(), Counted()

    async def fail() -> session_pb2.UpdateSessionResponse:
        await asyncio.sleep(0)
        raise PagecastError(Reason.NO_WORKER, "none")

    request = update(new_id())
    both = await asyncio.gather(
        *(replays.answer("UpdateSession", request, fail) for _ in range(2)), return_exceptions=True
    )
    assert all(isinstance(error, PagecastError) for error in both)
    assert not replays._running
    await replays.answer("UpdateSession", request, run)
    assert run.count == 1


async def test_without_a_request_id_every_call_runs() -> None:
    replays, run = Replays(), Counted()
    request = session_pb2.UpdateSessionRequest(session_id=SESSION)
    for _ in range(3):
        await replays.answer("UpdateSession", request, run)
    assert (run.count, len(replays._kept)) == (3, 0)


async def test_a_call_that_is_not_undone_runs_to_its_end_without_callers() -> None:
    replays, gate, request = Replays(), asyncio.Event(), update(new_id())

    async def slow() -> session_pb2.UpdateSessionResponse:
        await gate.wait()
        return session_pb2.UpdateSessionResponse(session=session_pb2.Session(model="first"))

    caller = asyncio.create_task(replays.answer("UpdateSession", request, slow))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    gate.set()
    answer = await replays.answer("UpdateSession", request, Counted())
    assert answer.session.model == "first"
