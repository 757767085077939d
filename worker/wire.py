"""The worker's values to protobuf and back. Pure; decides nothing."""

from google.protobuf.timestamp_pb2 import Timestamp

from pagecast.v1 import generation_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from worker.batch import (
    DecodePlan,
    Failed,
    Finished,
    FinishReason,
    PlanAction,
    PlanCounters,
    Started,
    TokenDrawn,
    UsageCounts,
)
from worker.commands import SessionView
from worker.errors import Refused
from worker.params import Sampling

_PLANS = {
    DecodePlan.PLAN_ONCE: session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE,
    DecodePlan.REPLAN: session_pb2.PAGED_DECODE_PLAN_REPLAN,
}
_PLAN_ACTIONS = {
    PlanAction.BUILT: generation_pb2.PLAN_ACTION_BUILT,
    PlanAction.REUSED: generation_pb2.PLAN_ACTION_REUSED,
    PlanAction.REPLANNED: generation_pb2.PLAN_ACTION_REPLANNED,
}
_FINISH_REASONS = {
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_SEQUENCE: generation_pb2.FINISH_REASON_STOP_SEQUENCE,
    FinishReason.STOP_TOKEN: generation_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.MAX_TOKENS: generation_pb2.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_FULL: generation_pb2.FINISH_REASON_CONTEXT_FULL,
    FinishReason.TIME_LIMIT: generation_pb2.FINISH_REASON_TIME_LIMIT,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
    # The end of an AppendInput, which tells its caller no reason.
    FinishReason.APPENDED: generation_pb2.FINISH_REASON_UNSPECIFIED,
}


def plan_from_wire(value: session_pb2.PagedDecodePlan) -> DecodePlan | None:
    """None for UNSPECIFIED. Refused: FIELD_INVALID for a number that names no plan."""
    if value == session_pb2.PAGED_DECODE_PLAN_UNSPECIFIED:
        return None
    for plan, number in _PLANS.items():
        if number == value:
            return plan
    raise Refused("FIELD_INVALID", f"no decode plan has number {value}", field="decode_plan")


def refusal_to_wire(refused: Refused) -> worker_pb2.Refusal:
    """A refusal as the gateway reads it."""
    return worker_pb2.Refusal(
        reason=refused.reason, field=refused.field, message=refused.message, metadata=dict(refused.metadata)
    )


def sampling_to_wire(sampling: Sampling) -> session_pb2.SamplingParams:
    """Effective sampling, every value set; what is off (top_k, logprobs) is absent."""
    return session_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
    )


def session_to_wire(view: SessionView, *, model: str, fingerprint: str) -> session_pb2.Session:
    """A session's view as the public API shows it."""
    is_dropped = view.num_kv_blocks == 0 and view.num_tokens > 1
    return session_pb2.Session(
        session_id=view.session_id,
        model=model,
        state=session_pb2.SESSION_STATE_ACTIVE,
        kv_residency=(session_pb2.KV_RESIDENCY_DROPPED if is_dropped else session_pb2.KV_RESIDENCY_DEVICE),
        decode_plan=_PLANS[view.plan],
        revision=view.revision,
        num_tokens=view.num_tokens,
        num_computed_tokens=view.num_computed,
        max_context_tokens=view.max_context_tokens,
        num_kv_blocks=view.num_kv_blocks,
        plan_stats=_plan_stats(view.plan_counters),
        create_time=_timestamp(view.create_time_s),
        last_active_time=_timestamp(view.last_active_time_s),
        labels=dict(view.labels),
        numerics_fingerprint=fingerprint,
        priority=view.priority,
    )


def put_token(report: worker_pb2.StreamStepsResponse, event: TokenDrawn, *, with_timing: bool) -> None:
    """Add a token to a report, as the gateway relays it.

    What a token has is set where it will lie. A message that is made first is serialised and parsed to get
    there, as often as it is deep; and named arguments take twice as long as attributes.

    Args:
        report: What to add to.
        event: What the engine told.
        with_timing: Whether the token carries its timing.
    """
    wire = report.events.add()
    wire.generation_id = event.generation_id
    chunk = wire.chunk
    chunk.first_token_index = event.number
    chunk.text_delta = event.text
    usage, counts = chunk.usage, event.usage
    usage.input_tokens = counts.input_tokens
    usage.cached_tokens = counts.cached_tokens
    usage.reprefilled_tokens = counts.reprefilled_tokens
    usage.output_tokens = counts.output_tokens
    drawn = event.drawn
    token = chunk.tokens.add()
    token.id = drawn.token_id
    if drawn.logprob is not None:
        token.logprob = drawn.logprob
    for top in drawn.top:
        token.top.add(id=top.token_id, logprob=top.logprob)
    if with_timing:
        _put_timing(token.timing, event)


def put_event(
    report: worker_pb2.StreamStepsResponse,
    event: Started | Finished | Failed,
    *,
    sampling: session_pb2.SamplingParams,
    input_token_ids: tuple[int, ...],
) -> None:
    """Add an event that is no token to a report: messages of the public API.

    Args:
        report: What to add to.
        event: What the engine told.
        sampling: Echoed when the turn starts.
        input_token_ids: Echoed when the turn starts; empty if not asked for.
    """
    wire = report.events.add(generation_id=event.generation_id)
    match event:
        case Started():
            started = generation_pb2.GenerationStarted(
                generation_id=event.generation_id,
                sampling=sampling,
                usage=_usage(event.usage),
                queue_ns=event.queue_ns,
                kv_residency=(
                    session_pb2.KV_RESIDENCY_DROPPED if event.was_dropped else session_pb2.KV_RESIDENCY_DEVICE
                ),
                input_token_ids=input_token_ids,
            )
            wire.started.CopyFrom(started)
        case Finished():
            if event.text:
                wire.chunk.first_token_index = event.usage.output_tokens
                wire.chunk.text_delta = event.text
                wire.chunk.usage.CopyFrom(_usage(event.usage))
                wire = report.events.add(generation_id=event.generation_id)
            wire.finished.CopyFrom(_finished(event))
            wire.is_late = event.is_late
            wire.num_tokens = event.num_tokens
        case Failed():
            failed = worker_pb2.Refusal(
                reason=event.reason, message=event.message, metadata=dict(event.metadata)
            )
            wire.failed.CopyFrom(failed)


def _put_timing(timing: generation_pb2.TokenTiming, event: TokenDrawn) -> None:
    result = event.result
    timing.since_start_ns = event.since_start_ns
    timing.itl_ns = event.itl_ns
    timing.queue_ns = event.queue_ns
    timing.plan_ns = result.plan_ns
    timing.step_ns = result.step_ns
    timing.sample_ns = event.sample_ns
    timing.plan_action = _PLAN_ACTIONS[result.plan_action]
    timing.batch_size = result.batch_size
    timing.kernel_ns = result.kernel_ns
    timing.launches = result.launches
    timing.host_bytes = result.host_bytes


def _finished(event: Finished) -> generation_pb2.GenerationFinished:
    return generation_pb2.GenerationFinished(
        finish_reason=_FINISH_REASONS[event.reason],
        stop_sequence=event.stopped_by if isinstance(event.stopped_by, str) else None,
        stop_token_id=event.stopped_by if isinstance(event.stopped_by, int) else None,
        usage=_usage(event.usage),
        timing=generation_pb2.GenerationTiming(
            queue_ns=event.queue_ns, ttft_ns=event.ttft_ns, e2e_ns=event.e2e_ns
        ),
        revision=event.revision,
        plan_stats=_plan_stats(event.plan_counters),
    )


def _usage(usage: UsageCounts) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        input_tokens=usage.input_tokens,
        cached_tokens=usage.cached_tokens,
        reprefilled_tokens=usage.reprefilled_tokens,
        output_tokens=usage.output_tokens,
    )


def _plan_stats(counters: PlanCounters) -> session_pb2.PlanStats:
    return session_pb2.PlanStats(
        builds=counters.builds,
        reuses=counters.reuses,
        replans=counters.replans,
        launches_per_step=counters.launches_per_step,
        host_bytes_per_step=counters.host_bytes_per_step,
        plan_ns=counters.plan_ns,
        step_ns=counters.step_ns,
        arena_bytes=counters.arena_bytes,
    )


def _timestamp(time_s: float) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromNanoseconds(int(time_s * 1e9))
    return timestamp
