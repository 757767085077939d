import asyncio

import grpc
import pytest

from pagecast.v1 import generation_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from service.ids import new_generation_id
from tests.service.conftest import Gateway, MakeGateway, drain, failure, until

STARTED = generation_pb2.GenerationStarted(usage=generation_pb2.Usage(input_tokens=3))


async def test_relays_events_in_order_and_logs_the_generation(gateway: Gateway) -> None:
    session_id = await gateway.open()
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted()
    await gateway.worker.emit(generation_id, started=STARTED)
    await gateway.worker.emit_token(generation_id, 0, "Hel")
    await gateway.worker.emit_token(generation_id, 1, "lo")
    await gateway.worker.emit_finish(generation_id)
    responses = await drain(call)

    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert "".join(response.chunk.text_delta for response in responses) == "Hello"
    assert [token.id for response in responses for token in response.chunk.tokens] == [0, 1]
    assert gateway.worker.cancels == []
    submit = gateway.worker.submits[generation_id]
    assert submit.session_id == session_id
    assert submit.input.text == "hello there"

    (line,) = await gateway.log_lines("generation")
    assert set(line) == {
        "event", "ts", "session_id", "generation_id", "ttft_ns", "tpot_ns", "e2e_ns", "input_tokens",
        "cached_tokens", "output_tokens", "finish_reason", "status", "error_reason",
        "plan_builds", "plan_reuses", "plan_replans",
    }  # fmt: skip
    assert (line["session_id"], line["generation_id"]) == (session_id, generation_id)
    assert (line["input_tokens"], line["cached_tokens"], line["output_tokens"]) == (3, 2, 2)
    assert (line["plan_builds"], line["plan_reuses"], line["plan_replans"]) == (1, 4, 0)
    assert line["finish_reason"] == "EOS"
    assert 0 < line["ttft_ns"] <= line["e2e_ns"]
    assert b"hello there" not in gateway.stream.getvalue()


async def test_events_before_the_reply_of_submit_are_kept(gateway: Gateway) -> None:
    session_id = await gateway.open()
    gateway.worker.submit_gate.clear()
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted()
    await gateway.worker.emit(generation_id, started=STARTED)
    await gateway.worker.emit_token(generation_id, 0)
    await gateway.worker.emit_finish(generation_id)
    await asyncio.sleep(0.05)
    gateway.worker.submit_gate.set()
    assert [response.WhichOneof("event") for response in await drain(call)] == [
        "started", "chunk", "finished",
    ]  # fmt: skip


async def test_request_fields_reach_the_worker(gateway: Gateway) -> None:
    session_id = await gateway.open()
    request = generation_pb2.GenerateRequest(
        session_id=session_id,
        expected_revision=0,
        sampling=session_pb2.SamplingParams(temperature=0.5, seed=7),
        stopping=generation_pb2.StoppingCriteria(max_tokens=9),
        response=generation_pb2.ResponseOptions(token_timing=True, input_token_ids=True),
        cancel_policy=generation_pb2.CANCEL_POLICY_KEEP_PARTIAL,
        disconnect_policy=generation_pb2.DISCONNECT_POLICY_CANCEL,
    )
    call = gateway.generations.Generate(request)
    generation_id = await gateway.submitted()
    submit = gateway.worker.submits[generation_id]
    assert submit.HasField("expected_revision")
    assert not submit.HasField("input")
    assert submit.sampling == request.sampling
    assert submit.stopping == request.stopping
    assert submit.response == request.response
    assert submit.cancel_policy == request.cancel_policy
    await gateway.worker.emit_finish(generation_id)
    await drain(call)


async def test_a_client_that_leaves_cancels_the_turn(gateway: Gateway) -> None:
    session_id = await gateway.open()
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted()
    await gateway.worker.emit_token(generation_id, 0)
    await call.read()
    call.cancel()
    await until(lambda: gateway.worker.cancels == [generation_id])
    (line,) = await gateway.log_lines("generation")
    assert (line["status"], line["output_tokens"]) == ("CANCELLED", 1)
    assert line["tpot_ns"] is None
    # What the worker told of the turn that it rolled back.
    assert (line["finish_reason"], line["plan_reuses"], line["error_reason"]) == ("CANCELLED", 4, None)
    await until(lambda: gateway.turns.num_running == 0 and not gateway.links[0]._background)


async def test_a_deadline_cancels_the_turn(gateway: Gateway) -> None:
    session_id = await gateway.open()
    call = gateway.generate(session_id, timeout=0.3)
    generation_id = await gateway.submitted()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: gateway.worker.cancels == [generation_id])
    (line,) = await gateway.log_lines("generation")
    assert line["status"] == "DEADLINE_EXCEEDED"
    assert line["ttft_ns"] is None


async def test_a_client_that_leaves_during_submit_cancels_after_its_reply(gateway: Gateway) -> None:
    session_id = await gateway.open()
    gateway.worker.submit_gate.clear()
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted()
    call.cancel()
    await until(lambda: all(turn.is_leaving for turn in gateway.turns._running))
    await asyncio.sleep(0.05)
    assert gateway.worker.cancels == []
    gateway.worker.submit_gate.set()
    await until(lambda: gateway.worker.cancels == [generation_id])
    await until(lambda: gateway.turns.num_running == 0 and not gateway.links[0]._background)


async def test_a_refused_submit_is_not_cancelled(gateway: Gateway) -> None:
    session_id = await gateway.open()
    gateway.worker.refusals["Submit"] = worker_pb2.Refusal(
        reason="PROMPT_TOO_LONG", field="input", message="too long", metadata={"wanted": "9", "limit": "8"}
    )
    status, reason, metadata, _ = await failure(drain(gateway.generate(session_id)))
    assert (status, reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert metadata == {"field": "input", "wanted": "9", "limit": "8"}
    assert gateway.worker.cancels == []
    (line,) = await gateway.log_lines("generation")
    assert (line["status"], line["error_reason"]) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")


async def test_a_failed_generation_is_a_status(gateway: Gateway) -> None:
    session_id = await gateway.open()
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted()
    refusal = worker_pb2.Refusal(reason="KV_EXHAUSTED", message="no block", metadata={"wanted": "4"})
    await gateway.worker.emit(generation_id, failed=refusal)
    status, reason, metadata, _ = await failure(drain(call))
    assert (status, reason, metadata) == ("RESOURCE_EXHAUSTED", "KV_EXHAUSTED", {"wanted": "4"})
    assert gateway.worker.cancels == []


async def test_a_reason_that_nobody_knows_is_internal_and_cancels(gateway: Gateway) -> None:
    session_id = await gateway.open()
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted()
    await gateway.worker.emit(generation_id, failed=worker_pb2.Refusal(reason="SECRET_TALE"))
    status, reason, metadata, whole = await failure(drain(call))
    assert (status, reason) == ("INTERNAL", "INTERNAL")
    assert b"SECRET_TALE" not in whole.SerializeToString()
    (line,) = await gateway.log_lines("internal_error")
    assert line["error_id"] == metadata["error_id"]
    assert "SECRET_TALE" in line["exception"]


async def test_cancel_generation_ends_the_stream_ok(gateway: Gateway) -> None:
    session_id = await gateway.open()
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted()
    request = generation_pb2.CancelGenerationRequest(session_id=session_id, generation_id=generation_id)
    await gateway.generations.CancelGeneration(request)
    responses = await drain(call)
    assert responses[-1].finished.finish_reason == generation_pb2.FINISH_REASON_CANCELLED
    assert await call.code() is grpc.StatusCode.OK
    assert gateway.worker.cancels == [generation_id]


async def test_cancel_of_an_unknown_generation_is_refused(gateway: Gateway) -> None:
    session_id = await gateway.open()
    gateway.worker.refusals["Cancel"] = worker_pb2.Refusal(reason="GENERATION_NOT_FOUND", message="none")
    request = generation_pb2.CancelGenerationRequest(session_id=session_id, generation_id=new_generation_id())
    status, reason, _, _ = await failure(gateway.generations.CancelGeneration(request))
    assert (status, reason) == ("NOT_FOUND", "GENERATION_NOT_FOUND")


async def test_a_slow_reader_gets_every_token_and_holds_up_nobody(make_gateway: MakeGateway) -> None:
    # Without these, a client that does not read still takes tens of thousands of messages.
    gateway = await make_gateway(
        client_options=(("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535))
    )
    slow = gateway.generate(await gateway.open())
    slow_id = await gateway.submitted(1)
    quick = gateway.generate(await gateway.open())
    quick_id = await gateway.submitted(2)
    (turn,) = (turn for turn in gateway.turns._running if turn.generation_id == slow_id)
    count, text = 2000, "y" * 2000
    for index in range(count):
        await gateway.worker.emit_token(slow_id, index, text)
    await gateway.worker.emit_finish(slow_id)
    await gateway.worker.emit_finish(quick_id)
    await drain(quick)
    await until(lambda: turn.is_over)
    # 16 chunks of this text merge into one.
    assert 2 <= turn._events.num_events <= count / 16 + 2

    responses = await drain(slow)
    chunks = [response.chunk for response in responses if response.HasField("chunk")]
    assert [token.id for chunk in chunks for token in chunk.tokens] == list(range(count))
    assert sum(len(chunk.text_delta) for chunk in chunks) == count * len(text)
    assert len(chunks) < count
    position = 0
    for chunk in chunks:
        assert chunk.first_token_index == position
        position += len(chunk.tokens)
        assert chunk.usage.output_tokens == position


async def test_a_slow_reader_that_leaves_in_a_blocked_write_cancels(make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(
        client_options=(("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535))
    )
    call = gateway.generate(await gateway.open())
    generation_id = await gateway.submitted()
    for index in range(30):
        await gateway.worker.emit_token(generation_id, index, "z" * 400_000)
    (turn,) = gateway.turns._running
    await until(lambda: turn._events.num_events > 0)
    call.cancel()
    await until(lambda: gateway.worker.cancels == [generation_id])
    (line,) = await gateway.log_lines("generation")
    assert line["status"] == "CANCELLED"
    assert b"internal_error" not in gateway.stream.getvalue()


async def test_a_session_that_is_lost_shows_its_last_turn(gateway: Gateway) -> None:
    session_id = await gateway.open()
    call = gateway.generate(session_id)
    generation_id = await gateway.submitted()
    await gateway.worker.emit_finish(generation_id)
    await drain(call)
    gateway.links[0]._hang("as the test says")
    get = session_pb2.GetSessionRequest(session_id=session_id)
    session = (await gateway.sessions.GetSession(get)).session
    assert session.state == session_pb2.SESSION_STATE_FAILED
    assert (session.revision, session.num_tokens) == (1, 5)
