import io
import json

import pytest

from pagecast._log import LogWriter, open_log
from pagecast.v1 import generation_pb2, session_pb2
from service.telemetry.generations import GenerationRecord


def test_times_of_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1_000, 4_000, 7_000, 10_000, 12_000])
    monkeypatch.setattr("service.telemetry.generations.time.monotonic_ns", lambda: next(clock))
    record = GenerationRecord("ses", "gen")
    for index in range(3):
        chunk = generation_pb2.TokenChunk(tokens=[generation_pb2.Token(id=index)])
        record.observe_chunk(chunk)
    finished = generation_pb2.GenerationFinished(
        finish_reason=generation_pb2.FINISH_REASON_MAX_TOKENS,
        usage=generation_pb2.Usage(input_tokens=5, cached_tokens=4),
        plan_stats=session_pb2.PlanStats(builds=1, reuses=2, replans=0),
    )
    record.observe(generation_pb2.GenerateResponse(finished=finished))
    stream = io.BytesIO()
    with LogWriter(stream) as writer:
        record.log(open_log(writer, "info"), "OK")
    line = json.loads(stream.getvalue())
    assert (line["ttft_ns"], line["tpot_ns"], line["e2e_ns"]) == (3_000, 3_000, 11_000)
    assert (line["input_tokens"], line["cached_tokens"], line["output_tokens"]) == (5, 4, 3)
    assert (line["plan_builds"], line["plan_reuses"], line["plan_replans"]) == (1, 2, 0)
    assert (line["finish_reason"], line["error_reason"]) == ("MAX_TOKENS", None)


def test_a_generation_that_was_refused_tells_why_and_what_is_not_known() -> None:
    stream = io.BytesIO()
    with LogWriter(stream) as writer:
        GenerationRecord("ses", "gen").log(
            open_log(writer, "info"), "RESOURCE_EXHAUSTED", error_reason="KV_EXHAUSTED"
        )
    line = json.loads(stream.getvalue())
    assert (line["status"], line["error_reason"]) == ("RESOURCE_EXHAUSTED", "KV_EXHAUSTED")
    unknown = ("ttft_ns", "tpot_ns", "input_tokens", "cached_tokens", "finish_reason", "plan_builds")
    assert [line[name] for name in unknown] == [None] * len(unknown)


def test_a_generation_without_an_end_tells_the_counts_of_its_last_chunk() -> None:
    record = GenerationRecord("ses", "gen")
    started = generation_pb2.GenerationStarted(usage=generation_pb2.Usage(input_tokens=5, cached_tokens=1))
    record.observe(generation_pb2.GenerateResponse(started=started))
    chunk = generation_pb2.TokenChunk(tokens=[generation_pb2.Token(id=1), generation_pb2.Token(id=2)])
    chunk.usage.input_tokens, chunk.usage.cached_tokens = 5, 4
    record.observe_chunk(chunk)
    record.observe_chunk(generation_pb2.TokenChunk(text_delta="held"))
    stream = io.BytesIO()
    with LogWriter(stream) as writer:
        record.log(open_log(writer, "info"), "CANCELLED")
    line = json.loads(stream.getvalue())
    assert (line["input_tokens"], line["cached_tokens"], line["output_tokens"]) == (5, 4, 2)
