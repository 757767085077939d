import asyncio

import pytest

from pagecast.v1 import generation_pb2
from service.errors import PagecastError, Reason
from service.events import MAX_CHUNK_TOKENS, EventLog

STARTED = generation_pb2.GenerateResponse(started=generation_pb2.GenerationStarted(generation_id="g"))
FINISHED = generation_pb2.GenerateResponse(finished=generation_pb2.GenerationFinished(revision=1))


def chunk(index: int, text: str = "x") -> generation_pb2.GenerateResponse:
    usage = generation_pb2.Usage(output_tokens=index + 1)
    tokens = [generation_pb2.Token(id=index)]
    return generation_pb2.GenerateResponse(
        chunk=generation_pb2.TokenChunk(first_token_index=index, tokens=tokens, text_delta=text, usage=usage)
    )


async def read(log: EventLog) -> list[generation_pb2.GenerateResponse]:
    return [event async for event in log.read()]


def ids(events: list[generation_pb2.GenerateResponse]) -> list[int]:
    return [token.id for event in events for token in event.chunk.tokens]


async def test_what_nobody_took_is_merged_and_what_was_taken_never_changes() -> None:
    log = EventLog(keeps_all=True)
    log.put(chunk(0))
    reader = log.read()
    first = await anext(reader)
    log.put(chunk(1))
    log.put(chunk(2))
    assert ids([first]) == [0]
    second = await anext(reader)
    assert ids([second]) == [1, 2]
    assert (second.chunk.first_token_index, second.chunk.text_delta) == (1, "xx")
    assert second.chunk.usage.output_tokens == 3
    log.put(FINISHED)
    log.close()
    assert [event async for event in reader] == [FINISHED]


async def test_every_reader_gets_everything_at_its_own_pace() -> None:
    log = EventLog(keeps_all=True)
    early = asyncio.create_task(read(log))
    log.put(STARTED)
    for index in range(50):
        log.put(chunk(index))
        await asyncio.sleep(0)
    late = asyncio.create_task(read(log))
    await asyncio.sleep(0)
    log.put(FINISHED)
    log.close()
    for events in (await early, await late, await read(log)):
        assert ids(events) == list(range(50))
        assert (events[0], events[-1]) == (STARTED, FINISHED)


async def test_without_keeping_what_was_taken_is_gone() -> None:
    log = EventLog(keeps_all=False)
    reader = log.read()
    for index in range(20):
        log.put(chunk(index))
        assert ids([await anext(reader)]) == [index]
        assert log.num_events == 0


async def test_a_compacted_log_is_short_and_the_readers_of_the_long_one_go_on() -> None:
    log = EventLog(keeps_all=True)
    reader = log.read()
    log.put(STARTED)
    taken = [await anext(reader)]
    half = MAX_CHUNK_TOKENS
    for index in range(2 * half):
        log.put(chunk(index))
        if index < half:
            taken.append(await anext(reader))
    log.put(FINISHED)
    with pytest.raises(ValueError, match="open"):
        log.compact()
    log.close()
    size_bytes = log.num_bytes
    log.compact()
    assert log.num_events == 4
    assert log.num_bytes < size_bytes / 2
    whole = await read(log)
    assert ids(whole) == list(range(2 * half))
    assert whole[2].chunk.first_token_index == MAX_CHUNK_TOKENS
    assert ids(taken + [event async for event in reader]) == list(range(2 * half))


async def test_an_error_comes_after_the_events_and_the_first_one_counts() -> None:
    log = EventLog(keeps_all=True)
    log.put(STARTED)
    log.close(PagecastError(Reason.DRAINING, "first"))
    log.close(PagecastError(Reason.INTERNAL, "second"))
    log.put(FINISHED)
    reader = log.read()
    assert await anext(reader) == STARTED
    with pytest.raises(PagecastError, match="first"):
        await anext(reader)
