"""The worker's values to protobuf and back. Pure; decides nothing."""

from google.protobuf.timestamp_pb2 import Timestamp

from pagecast.v1 import generation_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from worker.batch import (
    DecodePlan,
    Event,
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


def event_to_wire(
    event: Event,
    *,
    sampling: session_pb2.SamplingParams,
    input_token_ids: tuple[int, ...],
    with_timing: bool,
) -> list[worker_pb2.GenerationEvent]:
    """One event as the gateway relays it: messages of the public API.

    Args:
        event: What the engine told.
        sampling: Echoed when the turn starts.
        input_token_ids: Echoed when the turn starts; empty if not asked for.
        with_timing: Whether tokens carry their timing.
    """
    generation_id = event.generation_id
    match event:
        case Started():
            started = generation_pb2.GenerationStarted(
                generation_id=generation_id,
                sampling=sampling,
                usage=_usage(event.usage),
                queue_ns=event.queue_ns,
                kv_residency=(
                    session_pb2.KV_RESIDENCY_DROPPED if event.was_dropped else session_pb2.KV_RESIDENCY_DEVICE
                ),
                input_token_ids=input_token_ids,
            )
            return [worker_pb2.GenerationEvent(generation_id=generation_id, started=started)]
        case TokenDrawn():
            chunk = generation_pb2.TokenChunk(
                first_token_index=event.index,
                tokens=[_token(event, with_timing=with_timing)],
                text_delta=event.text,
                usage=_usage(event.usage),
            )
            return [worker_pb2.GenerationEvent(generation_id=generation_id, chunk=chunk)]
        case Finished():
            end = worker_pb2.GenerationEvent(
                generation_id=generation_id,
                finished=_finished(event),
                is_late=event.is_late,
                num_tokens=event.num_tokens,
            )
            events = [end]
            if event.text:
                rest = generation_pb2.TokenChunk(
                    first_token_index=event.usage.output_tokens,
                    text_delta=event.text,
                    usage=_usage(event.usage),
                )
                events.insert(0, worker_pb2.GenerationEvent(generation_id=generation_id, chunk=rest))
            return events
        case Failed():
            failed = worker_pb2.Refusal(
                reason=event.reason, message=event.message, metadata=dict(event.metadata)
            )
            return [worker_pb2.GenerationEvent(generation_id=generation_id, failed=failed)]


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


def _token(event: TokenDrawn, *, with_timing: bool) -> generation_pb2.Token:
    return generation_pb2.Token(
        id=event.drawn.token_id,
        logprob=event.drawn.logprob,
        top=[generation_pb2.TopToken(id=top.token_id, logprob=top.logprob) for top in event.drawn.top],
        timing=_timing(event) if with_timing else None,
    )


def _timing(event: TokenDrawn) -> generation_pb2.TokenTiming:
    return generation_pb2.TokenTiming(
        since_start_ns=event.since_start_ns,
        itl_ns=event.itl_ns,
        queue_ns=event.queue_ns,
        plan_ns=event.result.plan_ns,
        step_ns=event.result.step_ns,
        sample_ns=event.sample_ns,
        plan_action=_PLAN_ACTIONS[event.result.plan_action],
        batch_size=event.result.batch_size,
        kernel_ns=event.result.kernel_ns,
        launches=event.result.launches,
        host_bytes=event.result.host_bytes,
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
