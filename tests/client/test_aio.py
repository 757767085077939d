"""The asyncio client against a real server over loopback."""

import asyncio
import uuid

import pytest

import pagecast
from pagecast.v1 import session_pb2
from pagecast.v1.generation_pb2 import CancelGenerationRequest, GenerateRequest
from tests.client.fake_server import FakeServer


async def test_two_turns_stream_and_the_session_closes(fake: FakeServer) -> None:
    async with pagecast.AsyncClient(fake.target) as client:
        assert [model.name for model in await client.models()] == ["tiny"]
        async with await client.open_session("tiny", plan=pagecast.REPLAN, max_context_tokens=64) as session:
            generation = session.generate("hey", max_tokens=2)
            assert [chunk.text async for chunk in generation] == ["h", "e"]
            second = await session.generate([1, 2, 3]).wait()
            assert (await session.get()).revision == 2
            updated = await session.update(plan=pagecast.PLAN_ONCE)
            assert pagecast.PagedDecodePlan(updated.decode_plan) is pagecast.PLAN_ONCE
        assert fake.state[session.session_id].state == session_pb2.SESSION_STATE_CLOSED
    assert generation.result.plan_stats.replans == 2
    assert second.token_ids == (1, 2, 3)
    assert second.usage.cached_tokens == 4


async def test_many_sessions_stream_at_once(fake: FakeServer) -> None:
    async def one(client: pagecast.AsyncClient, text: str) -> str:
        async with await client.open_session("tiny") as session:
            return (await session.generate(text).wait()).text

    texts = [f"number {index}" for index in range(6)]
    async with pagecast.AsyncClient(fake.target) as client:
        assert await asyncio.gather(*(one(client, text) for text in texts)) == texts


async def test_own_cancel_raises_cancelled_and_reaches_the_server(fake: FakeServer) -> None:
    fake.hold_after = 1
    async with pagecast.AsyncClient(fake.target) as client:
        generation = (await client.open_session("tiny")).generate("abc")
        assert (await anext(generation)).text == "a"
        generation.cancel()
        with pytest.raises(pagecast.Cancelled, match=r"^CANCELLED: the call was cancelled$"):
            await anext(generation)
        assert await asyncio.to_thread(fake.ended.wait, 5)


async def test_what_came_stays_readable_when_the_turn_ends_in_an_exception(fake: FakeServer) -> None:
    async with pagecast.AsyncClient(fake.target) as client:
        session = await client.open_session("tiny")
        fake.hold_after = 2
        generation = session.generate("abc")
        assert (generation.text, generation.token_ids) == ("", ())
        await anext(generation)
        assert (generation.text, generation.token_ids) == ("a", (97,))
        await anext(generation)
        task = asyncio.create_task(generation.wait())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (generation.text, generation.token_ids) == ("ab", (97, 98))
        with pytest.raises(RuntimeError, match=r"^the generation was cancelled before it had been read"):
            _ = generation.result
        generation = session.generate("abc")
        await anext(generation)
        generation.cancel()
        with pytest.raises(RuntimeError, match=r"^the generation was cancelled before it had been read"):
            _ = generation.result
        with pytest.raises(pagecast.Cancelled):
            await generation.wait()
        with pytest.raises(
            RuntimeError, match=r"no result: it ended with CANCELLED: the call was cancelled$"
        ):
            _ = generation.result
        assert generation.text.startswith("a")
        assert await asyncio.to_thread(fake.ended.wait, 5)  # before the server is told otherwise
        fake.hold_after, fake.fail_after = None, 2
        generation = session.generate("abc")
        with pytest.raises(pagecast.WorkerLost):
            await generation.wait()
        assert (generation.text, generation.token_ids) == ("ab", (97, 98))
        with pytest.raises(RuntimeError, match=r"no result: it ended with WORKER_LOST: refused by the test$"):
            _ = generation.result


async def test_a_cancelled_task_stays_cancelled_and_ends_the_call(fake: FakeServer) -> None:
    fake.hold_after = 1
    async with pagecast.AsyncClient(fake.target) as client:
        session = await client.open_session("tiny")
        task = asyncio.create_task(session.generate("abc").wait())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.ended.wait, 5)


async def test_a_cancelled_task_is_not_mistaken_for_a_cancelled_call(fake: FakeServer) -> None:
    async def cancel_both(generation: pagecast.AsyncGeneration) -> None:
        generation.cancel()
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await anext(generation)

    fake.hold_after = 0
    async with pagecast.AsyncClient(fake.target) as client:
        task = asyncio.create_task(cancel_both((await client.open_session("tiny")).generate("abc")))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()


async def test_leaving_a_generation_cancels_it(fake: FakeServer) -> None:
    fake.hold_after = 1
    async with pagecast.AsyncClient(fake.target) as client:
        async with (await client.open_session("tiny")).generate("abc") as generation:
            await anext(generation)
            with pytest.raises(RuntimeError, match="has not ended"):
                _ = generation.result
        assert await asyncio.to_thread(fake.ended.wait, 5)


async def test_dropping_a_generation_cancels_it(fake: FakeServer) -> None:
    fake.hold_after = 1
    async with pagecast.AsyncClient(fake.target) as client:
        session = await client.open_session("tiny")
        async for _ in session.generate("abc"):
            break
        assert await asyncio.to_thread(fake.ended.wait, 5)
        unread = session.generate("abc")
        await asyncio.sleep(0.2)
        assert sum(isinstance(request, GenerateRequest) for request in fake.requests) == 2
        assert not fake.ended.is_set()
        del unread
        assert await asyncio.to_thread(fake.ended.wait, 5)


def test_a_generation_may_outlive_its_loop(fake: FakeServer) -> None:
    fake.hold_after = 1

    async def leave() -> pagecast.AsyncGeneration:
        async with pagecast.AsyncClient(fake.target) as client:
            generation = (await client.open_session("tiny")).generate("abc")
            await anext(generation)
            return generation

    generation = asyncio.run(leave())
    del generation  # an exception in the finaliser would fail the test
    assert fake.ended.wait(5)


async def test_what_came_before_a_failure_is_read_first(fake: FakeServer) -> None:
    fake.fail_after = 3
    async with pagecast.AsyncClient(fake.target) as client:
        generation = (await client.open_session("tiny")).generate("abcdef")
        seen = [(await anext(generation)).text]
        assert await asyncio.to_thread(fake.ended.wait, 5)
        await asyncio.sleep(0.2)  # all of it has arrived
        seen += [(await anext(generation)).text for _ in range(2)]
        assert seen == ["a", "b", "c"]
        with pytest.raises(pagecast.WorkerLost):
            await anext(generation)


async def test_cancel_from_outside_ends_the_stream_ok(fake: FakeServer) -> None:
    fake.hold_after = 1
    async with pagecast.AsyncClient(fake.target) as client:
        session = await client.open_session("tiny")
        generation = session.generate("abc")
        await anext(generation)
        assert generation.generation_id is not None
        await session.cancel(generation.generation_id)
        result = await generation.wait()
    assert result.finish_reason is pagecast.FinishReason.CANCELLED


async def test_errors_and_deadlines(fake: FakeServer) -> None:
    fake.hold_after = 0
    async with pagecast.AsyncClient(fake.target) as client:
        with pytest.raises(pagecast.ModelNotFound):
            await client.open_session("other")
        with pytest.raises(pagecast.SessionNotFound):
            await client.session("ses_x").generate("a").wait()
        session = await client.open_session("tiny")
        with pytest.raises(pagecast.DeadlineExceeded, match=r"the deadline of 0\.2 s passed"):
            await session.generate("abc", timeout_s=0.2).wait()


async def test_append_sessions_and_tokens(fake: FakeServer) -> None:
    async with pagecast.AsyncClient(fake.target) as client:
        opened = [
            (await client.open_session("tiny", top_k=3, initial_input=[1])).session_id for _ in range(3)
        ]
        session = client.session(opened[0])
        assert (await session.append([2, 3], request_id="r")).num_tokens == 3
        assert (await session.update(priority=-4)).priority == -4
        request_id = uuid.uuid4()
        with pytest.raises(pagecast.GenerationNotFound):
            await session.cancel("gen_9", request_id=request_id)
        assert fake.last(CancelGenerationRequest).request_id == str(request_id)
        await client.session(opened[2]).close(request_id=request_id)
        assert fake.last(session_pb2.CloseSessionRequest).request_id == str(request_id)
        assert [found.session_id async for found in client.sessions(page_size=2)] == opened[::-1]
        assert await client.tokenize("tiny", "ab") == (97, 98)
        assert await client.detokenize("tiny", [97, 98]) == "ab"
        result = await session.generate("ab", stop=["b"], logprobs=1).wait()
    assert (result.text, result.stopped_by, result.logprobs) == ("a", "b", (0.0,))
    pages = [request for request in fake.requests if isinstance(request, session_pb2.ListSessionsRequest)]
    assert [page.page_token for page in pages] == ["", "2"]
