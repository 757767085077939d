"""S6 over gRPC: thousands of sessions that come and go leave the pool exact."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from pagecast.v1 import generation_pb2, generation_pb2_grpc, session_pb2, session_pb2_grpc
from tests.e2e.rig import Rig

pytestmark = pytest.mark.e2e
AT_ONCE = 16


class Rounds:
    """Rounds of open, generate, cancel and close, each in one of five manners.

    Attributes:
        num_cut: Turns that a cancel or a close ended before their last token.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._sessions = session_pb2_grpc.SessionServiceStub(channel)
        self._generations = generation_pb2_grpc.GenerationServiceStub(channel)
        self.num_cut = 0

    async def run(self, number: int) -> None:
        """One round: a turn on a session of its own."""
        opened = await self._sessions.OpenSession(session_pb2.OpenSessionRequest(model="tight"))
        session_id = opened.session.session_id
        request = generation_pb2.GenerateRequest(
            session_id=session_id,
            input=session_pb2.Input(
                token_ids=session_pb2.TokenIds(ids=[3 + number % 250] * (1 + number * 7 % 60))
            ),
            stopping=generation_pb2.StoppingCriteria(max_tokens=4 if number % 5 == 4 else 450),
            cancel_policy=1 + number % 2,
        )
        call = self._generations.Generate(request)
        events = aiter(call)
        manner = number % 5
        if manner == 0:  # it may not even have been submitted
            call.cancel()
        elif manner < 4:
            started = (await anext(events)).started
        if manner == 1:
            call.cancel()
        elif manner == 2:
            await self._cancel(session_id, started.generation_id)
            await self._count(events)
        elif manner == 4:
            assert await end_of(events) == generation_pb2.FINISH_REASON_MAX_TOKENS
        closed = await self._sessions.CloseSession(session_pb2.CloseSessionRequest(session_id=session_id))
        assert closed.session.num_kv_blocks == 0
        if manner == 3:  # it was closed while its turn ran
            await self._count(events)

    async def _cancel(self, session_id: str, generation_id: str) -> None:
        """Cancel a turn that may be over by now."""
        request = generation_pb2.CancelGenerationRequest(session_id=session_id, generation_id=generation_id)
        try:
            await self._generations.CancelGeneration(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise

    async def _count(self, events: AsyncIterator[generation_pb2.GenerateResponse]) -> None:
        self.num_cut += await end_of(events) == generation_pb2.FINISH_REASON_CANCELLED


async def end_of(events: AsyncIterator[generation_pb2.GenerateResponse]) -> int:
    """Read to the end; the finish reason."""
    return [event.finished.finish_reason async for event in events][-1]


async def storm(rig: Rig, count: int) -> int:
    """Run so many rounds, some at a time; how many turns were cut."""
    numbers = iter(range(count))
    async with grpc.aio.insecure_channel(rig.server.target) as channel:
        rounds = Rounds(channel)

        async def go_on() -> None:
            for number in numbers:
                await rounds.run(number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(go_on())
    return rounds.num_cut


async def check(rig: Rig, count: int) -> None:
    api, worker = rig.api("tight"), rig.workers["tight"]
    expected = await asyncio.to_thread(api.said, [5, 6, 7], max_tokens=20)
    before = worker.info()
    # Of two fifths that would be cut that way many are faster.
    assert await storm(rig, count) > count // 20
    after = worker.info()
    assert after.num_free_kv_blocks == before.num_free_kv_blocks == after.num_kv_blocks == 32
    assert after.num_steps > before.num_steps
    assert await asyncio.to_thread(api.said, [5, 6, 7], max_tokens=20) == expected
    assert rig.server.events("internal_error") == []


async def test_s06_two_thousand_rounds_leave_the_pool_exact(rig: Rig) -> None:
    await check(rig, 2000)


@pytest.mark.long
async def test_s06_ten_thousand_rounds_leave_the_pool_exact(rig: Rig) -> None:
    await check(rig, 10_000)
