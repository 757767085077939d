"""Sessions whose gateway is gone are closed; all others stay."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pagecast.v1 import generation_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from tests.tiny_model import write_tiny_gguf
from tests.worker.service_harness import CONTEXT, Worker
from worker import owners as owners_module
from worker.errors import Refused
from worker.model.weights.gguf import read_gguf
from worker.owners import OwnerGone, Owners

NUM_BLOCKS = 2048
GRACE_S = 0.2


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners_module, "GONE_AFTER_S", GRACE_S)


class Closer:
    """Stands for the engine: notes what is closed, and refuses some."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.refused: set[str] = set()
        self.gone: list[int] = []
        self.owners = Owners(self.close, self.gone.append)

    async def close(self, session_id: str) -> None:
        self.closed.append(session_id)
        if session_id in self.refused:
            raise Refused("SESSION_CLOSED", "closed")


async def test_sessions_are_closed_when_their_owner_has_not_read_for_a_while() -> None:
    closer = Closer()
    owners = closer.owners
    with owners.reading("b"):
        with owners.reading("a"), owners.reading("a"):
            for number in range(3):
                owners.opened("a", f"a{number}")
                owners.opened("b", f"b{number}")
            owners.opened("", "nobody's")
        owners.closed("a0")
        owners.closed("unknown")
        closer.refused = {"a1"}
        await asyncio.sleep(GRACE_S / 2)
        assert closer.closed == []
        await asyncio.sleep(GRACE_S)
        assert sorted(closer.closed) == ["a1", "a2"]
        assert closer.gone == [1]
        with pytest.raises(OwnerGone), owners.reading("a"):
            pass
        # One that comes too late has nobody to look after it either.
        owners.opened("a", "late")
        await asyncio.sleep(GRACE_S * 1.5)
        assert closer.closed[2:] == ["late"]
    owners.closed("b0")


async def test_an_owner_that_comes_back_in_time_keeps_its_sessions() -> None:
    closer = Closer()
    for _ in range(3):
        with closer.owners.reading("a"):
            closer.owners.opened("a", "s")
        await asyncio.sleep(GRACE_S * 0.6)
    with closer.owners.reading("a"):
        await asyncio.sleep(GRACE_S * 1.5)
    closer.owners.closed("s")
    await asyncio.sleep(GRACE_S * 1.5)
    assert (closer.closed, closer.gone) == ([], [])
    # Without a session there was nothing to lose.
    with closer.owners.reading("a"):
        pass
    assert not closer.owners._owners
    assert not closer.owners._owner_of


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    """One whose turns can go on for longer than any test."""
    path = write_tiny_gguf(tmp_path / "long.gguf", ends=False, max_context_tokens=16_384)
    worker = Worker(read_gguf(path), num_blocks=NUM_BLOCKS, max_context_tokens=16_384)
    worker.start()
    yield worker
    await worker.stop()


async def read_for(worker: Worker, owner_id: str) -> None:
    request = worker_pb2.StreamStepsRequest(owner_id=owner_id)
    async for _ in worker.service.StreamSteps(request, CONTEXT):
        pass


async def state_of(worker: Worker, session_id: str) -> str:
    request = worker_pb2.GetSessionRequest(session_id=session_id)
    answer = await worker.service.GetSession(request, CONTEXT)
    return answer.refusal.reason or "OPEN"


async def test_a_gateway_that_is_gone_leaves_no_turn_and_no_block(worker: Worker) -> None:
    endless: dict[str, Any] = {"stopping": generation_pb2.StoppingCriteria(max_tokens=15_000)}
    readers = {owner: asyncio.create_task(read_for(worker, owner)) for owner in ("first", "second")}
    for session_id, owner_id in (("a", "first"), ("b", "second"), ("c", ""), ("idle", "first")):
        await worker.open(session_id=session_id, owner_id=owner_id)
    assert (await worker.open(session_id="x", owner_id="first", decode_plan=99)).refusal.reason
    await worker.submit(session_id="a", generation_id="g", **endless)
    await worker.submit(session_id="c", generation_id="h", **endless)
    readers["first"].cancel()
    with suppress(asyncio.CancelledError):
        await readers["first"]
    end = (await worker.events_of("g"))[-1]
    assert end.finished.finish_reason == generation_pb2.FINISH_REASON_CANCELLED
    async with asyncio.timeout(5):
        while not worker.gone:  # noqa: ASYNC110  a list, no event
            await asyncio.sleep(0.01)
    assert worker.gone == [2]
    states = [await state_of(worker, each) for each in ("a", "idle", "b", "c")]
    assert states == ["SESSION_CLOSED", "SESSION_CLOSED", "OPEN", "OPEN"]
    assert (await worker.turn(session_id="b", generation_id="i"))[-1].HasField("finished")
    for session_id in ("b", "c"):
        request = worker_pb2.CloseSessionRequest(session_id=session_id)
        answer = await worker.service.CloseSession(request, CONTEXT)
        assert answer.session.state == session_pb2.SESSION_STATE_CLOSED
    assert not worker.service._owners._owner_of
    assert worker.harness.engine.num_free_blocks == NUM_BLOCKS


async def test_a_session_has_its_owner_also_when_the_call_that_opens_it_is_cancelled(worker: Worker) -> None:
    opening = asyncio.create_task(worker.open(session_id="a", owner_id="first"))
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    async with asyncio.timeout(5):
        while not worker.gone:  # noqa: ASYNC110  a list, no event
            await asyncio.sleep(0.01)
    assert await state_of(worker, "a") == "SESSION_CLOSED"


async def test_the_end_of_a_turn_tells_the_length_of_the_log(worker: Worker) -> None:
    await worker.open()
    assert (await worker.turn())[-1].num_tokens == 7
    submitted = await worker.submit(
        generation_id="cancelled", stopping=generation_pb2.StoppingCriteria(max_tokens=15_000)
    )
    assert submitted.HasField("accepted")
    await worker.service.Cancel(worker_pb2.CancelRequest(session_id="a", generation_id="cancelled"), CONTEXT)
    assert (await worker.events_of("cancelled"))[-1].num_tokens == 7
