from pagecast.v1 import generation_pb2
from pagecast.worker.v1 import worker_pb2
from service.pool.mailbox import MAX_CHUNK_CHARACTERS, MAX_CHUNK_TOKENS, Mailbox


def chunk(index: int, text: str = "a") -> worker_pb2.GenerationEvent:
    tokens = [generation_pb2.Token(id=index)]
    return worker_pb2.GenerationEvent(
        generation_id="g",
        chunk=generation_pb2.TokenChunk(first_token_index=index, tokens=tokens, text_delta=text),
    )


def finished() -> worker_pb2.GenerationEvent:
    return worker_pb2.GenerationEvent(generation_id="g", finished=generation_pb2.GenerationFinished())


async def test_waiting_chunks_merge_and_other_events_do_not() -> None:
    mailbox = Mailbox()
    mailbox.put(worker_pb2.GenerationEvent(generation_id="g", started=generation_pb2.GenerationStarted()))
    for index in range(3):
        mailbox.put(chunk(index))
    mailbox.put(finished())
    assert (await mailbox.take()).HasField("started")
    merged = (await mailbox.take()).chunk
    assert [token.id for token in merged.tokens] == [0, 1, 2]
    assert (merged.first_token_index, merged.text_delta) == (0, "aaa")
    assert (await mailbox.take()).HasField("finished")


async def test_a_chunk_that_was_taken_does_not_grow() -> None:
    mailbox = Mailbox()
    mailbox.put(chunk(0))
    taken = await mailbox.take()
    mailbox.put(chunk(1))
    assert len(taken.chunk.tokens) == 1
    assert (await mailbox.take()).chunk.first_token_index == 1


async def test_a_report_is_not_changed_by_merging() -> None:
    mailbox = Mailbox()
    first = chunk(0)
    mailbox.put(first)
    mailbox.put(chunk(1))
    assert len(first.chunk.tokens) == 1


async def test_merged_chunks_stay_small_enough_to_send() -> None:
    mailbox = Mailbox()
    for index in range(MAX_CHUNK_TOKENS + 1):
        mailbox.put(chunk(index))
    assert len((await mailbox.take()).chunk.tokens) == MAX_CHUNK_TOKENS
    assert len((await mailbox.take()).chunk.tokens) == 1
    half = "b" * (MAX_CHUNK_CHARACTERS // 2)
    for index in range(3):
        mailbox.put(chunk(index, half))
    assert len((await mailbox.take()).chunk.text_delta) == MAX_CHUNK_CHARACTERS
    assert len((await mailbox.take()).chunk.text_delta) == len(half)
