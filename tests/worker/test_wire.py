"""Tokens on the wire: what is set in place is what a message made whole would hold."""

from typing import Any

import pytest

from pagecast.v1 import generation_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from worker.batch import (
    DecodePlan,
    Drawn,
    Event,
    Failed,
    Finished,
    FinishReason,
    Logprob,
    PlanAction,
    PlanCounters,
    RowResult,
    TokenDrawn,
    UsageCounts,
)
from worker.wire import put_event, put_token

USAGE = UsageCounts(5, 3, 2, 8)
RESULT = RowResult(PlanAction.REPLANNED, 11, 12, 13, 14, 15, 16, 17)


def wired(event: Event, *, with_timing: bool = False) -> list[worker_pb2.GenerationEvent]:
    report = worker_pb2.StreamStepsResponse()
    sampling = session_pb2.SamplingParams()
    if isinstance(event, TokenDrawn):
        put_token(report, event, with_timing=with_timing)
    else:
        put_event(report, event, sampling=sampling, input_token_ids=())
    return list(report.events)


@pytest.mark.parametrize("with_timing", [False, True])
@pytest.mark.parametrize("logprob", [None, 0.0, -0.5])
def test_a_token_has_all_that_was_told_of_it(logprob: float | None, *, with_timing: bool) -> None:
    top = () if logprob is None else (Logprob(9, -0.25), Logprob(0, -2.0))
    drawn = Drawn(0, logprob, top)
    event = TokenDrawn("g", "s", 7, drawn, "te", USAGE, DecodePlan.REPLAN, RESULT, 101, 102, 103, 104, 105)
    timing: dict[str, Any] = {"since_start_ns": 101, "itl_ns": 102, "queue_ns": 103, "sample_ns": 104}
    timing |= {"plan_ns": 11, "step_ns": 12, "kernel_ns": 13, "launches": 14, "host_bytes": 15}
    timing |= {"batch_size": 17, "plan_action": generation_pb2.PLAN_ACTION_REPLANNED}
    token = generation_pb2.Token(
        id=0,
        logprob=logprob,
        top=[generation_pb2.TopToken(id=each.token_id, logprob=each.logprob) for each in top],
        timing=generation_pb2.TokenTiming(**timing) if with_timing else None,
    )
    usage = generation_pb2.Usage(input_tokens=5, cached_tokens=3, reprefilled_tokens=2, output_tokens=8)
    chunk = generation_pb2.TokenChunk(first_token_index=7, tokens=[token], text_delta="te", usage=usage)
    assert wired(event, with_timing=with_timing) == [
        worker_pb2.GenerationEvent(generation_id="g", chunk=chunk)
    ]


@pytest.mark.parametrize("text", ["", "held"])
def test_text_that_was_held_back_comes_before_the_end(text: str) -> None:
    end = Finished("g", FinishReason.MAX_TOKENS, None, text, USAGE, 1, 2, 3, 4, 13, PlanCounters(reuses=8))
    *chunks, last = wired(end)
    assert [(each.chunk.text_delta, each.chunk.first_token_index) for each in chunks] == [("held", 8)] * bool(
        text
    )
    assert all(each.chunk.usage == last.finished.usage for each in chunks)
    assert (last.generation_id, last.num_tokens, last.is_late) == ("g", 13, False)
    assert (last.finished.revision, last.finished.timing.e2e_ns, last.finished.plan_stats.reuses) == (4, 3, 8)
    assert last.finished.finish_reason == generation_pb2.FINISH_REASON_MAX_TOKENS


def test_a_failure_tells_why() -> None:
    (event,) = wired(Failed("g", "INTERNAL", "it broke", {"error_id": "7"}))
    assert (event.generation_id, event.failed.reason, event.failed.message) == ("g", "INTERNAL", "it broke")
    assert dict(event.failed.metadata) == {"error_id": "7"}


def test_counters_follow_one_another_and_the_last_step_is_the_later_ones() -> None:
    early, late, none = PlanCounters(), PlanCounters(), PlanCounters()
    early.count(RESULT._replace(plan_action=PlanAction.BUILT))
    early.count(RESULT._replace(plan_action=PlanAction.REUSED))
    late.count(RESULT._replace(launches=90, host_bytes=91, arena_bytes=92))
    assert early.followed_by(late) == PlanCounters(1, 1, 1, 33, 36, 90, 91, 92)
    assert early.followed_by(none) == early
    assert early.followed_by(none) is not early
