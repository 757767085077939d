"""What WorkerService answers, and what its reports say."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from tests.worker.engine_harness import HeldSteps
from tests.worker.service_harness import CONTEXT, Worker
from worker.model.weights.gguf import GgufFile


@pytest.fixture
async def worker(file: GgufFile) -> AsyncIterator[Worker]:
    worker = Worker(file)
    worker.start()
    yield worker
    await worker.stop()


async def test_a_turn_echoes_every_effective_value_of_sampling(worker: Worker) -> None:
    defaults = session_pb2.SamplingParams(temperature=0.5, top_k=9, seed=3, logit_bias={4: 1.5})
    await worker.open(default_sampling=defaults)
    asked = session_pb2.SamplingParams(temperature=0.25, min_p=0.125, logprobs=2)
    events = await worker.turn(sampling=asked, response=generation_pb2.ResponseOptions(input_token_ids=True))
    effective = events[0].started.sampling
    assert effective == session_pb2.SamplingParams(
        temperature=0.25,
        top_k=9,
        top_p=1.0,
        min_p=0.125,
        seed=3,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias={4: 1.5},
        logprobs=2,
    )
    assert list(events[0].started.input_token_ids) == [5, 6, 7]
    tokens = [token for event in events for token in event.chunk.tokens]
    assert [len(token.top) for token in tokens] == [2] * 4
    assert all(token.HasField("logprob") and token.logprob <= 0.0 for token in tokens)
    assert not any(token.HasField("timing") for token in tokens)
    assert len(worker.logged) == 4


async def test_what_is_off_is_absent_and_the_seed_is_drawn(worker: Worker) -> None:
    await worker.open()
    seeds = set()
    for number in range(2):
        events = await worker.turn(generation_id=f"g{number}")
        effective = events[0].started.sampling
        seeds.add(effective.seed)
        assert (effective.HasField("top_k"), effective.HasField("logprobs")) == (False, False)
        assert (effective.temperature, effective.HasField("temperature")) == (0.0, True)
        assert not events[1].chunk.tokens[0].HasField("logprob")
    assert len(seeds) == 2


async def test_what_stopped_a_turn_is_told(worker: Worker) -> None:
    await worker.open()
    plain = await worker.turn()
    first = plain[1].chunk.tokens[0].id
    for number, (stopping, reason) in enumerate(
        [
            ({"stop_token_ids": [first]}, generation_pb2.FINISH_REASON_STOP_TOKEN),
            ({"max_tokens": 2}, generation_pb2.FINISH_REASON_MAX_TOKENS),
        ]
    ):
        await worker.open(session_id=f"s{number}")
        events = await worker.turn(
            session_id=f"s{number}",
            generation_id=f"h{number}",
            stopping=generation_pb2.StoppingCriteria(**stopping),
        )
        end = events[-1].finished
        assert end.finish_reason == reason
        if number == 0:
            assert (end.WhichOneof("stopped_by"), end.stop_token_id) == ("stop_token_id", first)
        else:
            assert end.WhichOneof("stopped_by") is None


async def test_an_append_ends_without_a_reason(worker: Worker) -> None:
    await worker.open()
    events = await worker.turn(append_only=True)
    assert [event.WhichOneof("event") for event in events] == ["started", "finished"]
    end = events[-1].finished
    assert (end.finish_reason, end.revision) == (generation_pb2.FINISH_REASON_UNSPECIFIED, 1)
    refusal = (await worker.submit(append_only=True, input=None, generation_id="h")).refusal
    assert (refusal.reason, refusal.field) == ("FIELD_REQUIRED", "input")


async def test_a_late_turn_that_is_kept_ends_as_finished_and_says_so(worker: Worker) -> None:
    await worker.open()
    kept = generation_pb2.CANCEL_POLICY_KEEP_PARTIAL
    started, end = await worker.turn(deadline=Duration(), cancel_policy=kept)
    assert started.HasField("started")
    assert (end.is_late, end.finished.finish_reason) == (True, generation_pb2.FINISH_REASON_CANCELLED)
    assert (end.finished.revision, end.finished.usage.input_tokens) == (1, 3)
    assert worker.harness.view("a").num_tokens == 3
    assert not any(event.is_late for event in await worker.turn(generation_id="h"))


async def test_a_late_turn_fails_with_its_reason(worker: Worker) -> None:
    await worker.open()
    (event,) = await worker.turn(deadline=Duration())
    assert event.failed.reason == "DEADLINE_EXCEEDED"
    (event,) = await worker.turn(generation_id="h", queue_timeout=Duration(nanos=1))
    assert event.failed.reason == "QUEUE_TIMEOUT"
    assert (await worker.turn(generation_id="i", deadline=Duration(seconds=60)))[-1].HasField("finished")


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"sampling": session_pb2.SamplingParams(top_p=0.0)}, "FIELD_OUT_OF_RANGE", "sampling.top_p"),
        (
            {"sampling": session_pb2.SamplingParams(logit_bias={272: 1.0})},
            "FIELD_OUT_OF_RANGE",
            "sampling.logit_bias",
        ),
        (
            {"stopping": generation_pb2.StoppingCriteria(stop_token_ids=[272])},
            "FIELD_OUT_OF_RANGE",
            "stopping.stop_token_ids",
        ),
        (
            {"stopping": generation_pb2.StoppingCriteria(max_tokens=0)},
            "FIELD_OUT_OF_RANGE",
            "stopping.max_tokens",
        ),
        ({"queue_timeout": Duration()}, "FIELD_OUT_OF_RANGE", "queue_timeout"),
        ({"time_limit": Duration(seconds=-1)}, "FIELD_OUT_OF_RANGE", "time_limit"),
        ({"cancel_policy": 9}, "FIELD_INVALID", "cancel_policy"),
        ({"expected_revision": 3}, "REVISION_MISMATCH", "expected_revision"),
        ({"input": None}, "FIELD_REQUIRED", "input"),
        ({"input": session_pb2.Input()}, "INPUT_EMPTY", "input"),
        ({"session_id": "b"}, "SESSION_NOT_FOUND", "session_id"),
        ({"generation_id": ""}, "FIELD_INVALID", "generation_id"),
    ],
)
async def test_a_refused_turn_changes_nothing(
    worker: Worker, fields: dict[str, Any], reason: str, field: str
) -> None:
    await worker.open()
    refusal = (await worker.submit(**fields)).refusal
    assert (refusal.reason, refusal.field) == (reason, field)
    assert worker.harness.view("a").num_tokens == 0
    assert (await worker.turn())[-1].finished.revision == 1


async def test_an_open_that_is_refused_opens_nothing(worker: Worker) -> None:
    for fields, field in (
        (
            {"default_sampling": session_pb2.SamplingParams(logit_bias={272: 1.0})},
            "default_sampling.logit_bias",
        ),
        ({"default_sampling": session_pb2.SamplingParams(min_p=2.0)}, "default_sampling.min_p"),
        ({"max_context_tokens": 0}, "max_context_tokens"),
        ({"decode_plan": 7}, "decode_plan"),
    ):
        assert (await worker.open(**fields)).refusal.field == field
    assert (await worker.open(priority=4)).session.priority == 4


async def test_s07_two_submits_of_one_id_at_once_are_one_turn(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldSteps(monkeypatch)  # an id may come again once its turn is over
    await worker.open()
    await worker.open(session_id="b")
    answers = await asyncio.gather(
        *(worker.submit(session_id=name) for name in ("a", "b", "a")), return_exceptions=False
    )
    held.go_on.set()
    assert [answer.HasField("accepted") for answer in answers].count(True) == 1
    assert {answer.refusal.field for answer in answers if answer.HasField("refusal")} == {"generation_id"}
    assert sum(len(event.chunk.tokens) for event in await worker.events_of("g")) == 4


async def test_several_sessions_are_read_at_once_and_those_not_open_left_out(worker: Worker) -> None:
    for name in ("a", "b", "c"):
        await worker.open(session_id=name, priority=ord(name))
    await worker.service.CloseSession(worker_pb2.CloseSessionRequest(session_id="b"), CONTEXT)
    request = worker_pb2.BatchGetSessionsRequest(session_ids=["c", "nobody", "b", "a"])
    answer = await worker.service.BatchGetSessions(request, CONTEXT)
    assert [(session.session_id, session.priority) for session in answer.sessions] == [("c", 99), ("a", 97)]


async def test_priority_is_updated_and_left_alone(worker: Worker) -> None:
    await worker.open(priority=4)
    for fields, priority in (({"priority": 0}, 0), ({"labels": {"k": "v"}}, 0), ({"priority": -7}, -7)):
        request = worker_pb2.UpdateSessionRequest(session_id="a", **fields)  # type: ignore[arg-type]
        assert (await worker.service.UpdateSession(request, CONTEXT)).session.priority == priority


async def test_tokenize_gives_the_log_of_a_fresh_session_and_detokenize_its_text(worker: Worker) -> None:
    said = [session_pb2.Message(role=session_pb2.ROLE_USER, content="hello 🙂")]
    for number, source in enumerate(
        [
            session_pb2.Input(text="hello 🙂 the end"),
            session_pb2.Input(messages=session_pb2.Messages(messages=said)),
        ]
    ):
        answer = await worker.service.Tokenize(worker_pb2.TokenizeRequest(input=source), CONTEXT)
        await worker.open(session_id=f"s{number}")
        await worker.turn(
            session_id=f"s{number}", generation_id=f"g{number}", input=source, append_only=False
        )
        log = worker.harness.session(f"s{number}").token_ids
        assert log[:-4] == list(answer.token_ids)
        request = worker_pb2.DetokenizeRequest(token_ids=answer.token_ids)
        assert "hello 🙂" in (await worker.service.Detokenize(request, CONTEXT)).text


async def test_tokenize_and_detokenize_refuse_by_field(worker: Worker) -> None:
    for source, reason in (
        ({}, "FIELD_REQUIRED"),
        ({"input": session_pb2.Input()}, "INPUT_EMPTY"),
        ({"input": session_pb2.Input(text="x" * 1025)}, "PROMPT_TOO_LONG"),
    ):
        answer = await worker.service.Tokenize(worker_pb2.TokenizeRequest(**source), CONTEXT)
        assert (answer.refusal.reason, answer.refusal.field, len(answer.token_ids)) == (reason, "input", 0)
    request = worker_pb2.DetokenizeRequest(token_ids=[5, 272])
    refusal = (await worker.service.Detokenize(request, CONTEXT)).refusal
    assert (refusal.reason, refusal.field) == ("FIELD_OUT_OF_RANGE", "token_ids")


async def test_timing_and_plan_stats_tell_what_steps_cost(worker: Worker) -> None:
    await worker.open()
    events = await worker.turn(response=generation_pb2.ResponseOptions(token_timing=True))
    timings = [token.timing for event in events for token in event.chunk.tokens]
    stats = events[-1].finished.plan_stats
    results = [event.result for event in worker.logged]
    assert len(timings) == len(results) == 4
    for timing, result in zip(timings, results, strict=True):
        assert (timing.plan_ns, timing.step_ns) == (result.plan_ns, result.step_ns)
        assert (timing.kernel_ns, timing.launches) == (result.kernel_ns, result.launches)
        assert timing.host_bytes == result.host_bytes
        assert 0 < timing.kernel_ns <= timing.step_ns
        assert timing.launches > 0
    # Every step drew a token, so that theirs are all of the steps.
    assert stats.plan_ns == sum(timing.plan_ns for timing in timings) > 0
    assert stats.step_ns == sum(timing.step_ns for timing in timings)
    assert stats.arena_bytes == results[-1].arena_bytes > 0
    assert (stats.launches_per_step, stats.host_bytes_per_step) == (
        timings[-1].launches,
        timings[-1].host_bytes,
    )
    view = await worker.service.GetSession(worker_pb2.GetSessionRequest(session_id="a"), CONTEXT)
    assert view.session.plan_stats == stats


async def test_the_worker_tells_of_its_steps(worker: Worker) -> None:
    await worker.open()
    await worker.turn()
    info = await worker.service.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), CONTEXT)
    assert (info.num_steps, info.running_step_ns, info.num_free_kv_blocks) == (4, 0, 63)
