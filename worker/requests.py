"""Requests of the wire to commands. Reads and checks; knows no sessions beyond what a turn builds on."""

import secrets

from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2
from pagecast.worker.v1 import worker_pb2
from worker import commands
from worker.checks import duration_ns, out_of_range, sampling_choice, stopping_from_wire
from worker.commands import TurnBase
from worker.errors import Refused
from worker.intake import Intake
from worker.params import Stopping
from worker.wire import plan_from_wire


def open_session(request: worker_pb2.OpenSessionRequest, intake: Intake) -> commands.OpenSession:
    """Refused: FIELD_INVALID, FIELD_OUT_OF_RANGE."""
    max_context_tokens = request.max_context_tokens if request.HasField("max_context_tokens") else None
    if max_context_tokens == 0:
        raise out_of_range("max_context_tokens", "must be at least 1", min="1")
    return commands.OpenSession(
        session_id=request.session_id,
        plan=plan_from_wire(request.decode_plan),
        max_context_tokens=max_context_tokens,
        defaults=sampling_choice(request.default_sampling, "default_sampling", vocab_size=intake.vocab_size),
        labels=dict(request.labels),
        priority=request.priority,
    )


def update_session(request: worker_pb2.UpdateSessionRequest) -> commands.UpdateSession:
    """Refused: FIELD_INVALID."""
    return commands.UpdateSession(
        session_id=request.session_id,
        expected_revision=_expected_revision(request),
        plan=plan_from_wire(request.decode_plan),
        labels=dict(request.labels),
        priority=request.priority if request.HasField("priority") else None,
    )


def submit(
    request: worker_pb2.SubmitRequest, base: TurnBase, intake: Intake, *, received_ns: int
) -> commands.Submit:
    """A turn on top of `base`: tokenised, its sampling effective, its times by the monotonic clock.

    Takes as long as the input is; the checks that cost nothing come first.

    Args:
        request: What the gateway sent.
        base: What the turn builds on.
        intake: Tokenises.
        received_ns: When the request came; times count from here.

    Refused: as `Intake.prepare`, and FIELD_REQUIRED, FIELD_INVALID, FIELD_OUT_OF_RANGE.
    """
    appends_only = request.append_only
    has_input = request.HasField("input")
    if appends_only and not has_input:
        raise Refused("FIELD_REQUIRED", "there is nothing to append", field="input")
    if request.cancel_policy not in generation_pb2.CancelPolicy.values():
        raise Refused("FIELD_INVALID", f"no policy has number {request.cancel_policy}", field="cancel_policy")
    asked = sampling_choice(request.sampling, "sampling", vocab_size=intake.vocab_size)
    stopping = stopping_from_wire(request.stopping, eos_ids=intake.eos_ids, vocab_size=intake.vocab_size)
    queue_timeout_ns = _optional_ns(request, "queue_timeout")
    time_limit_ns = _optional_ns(request, "time_limit")
    prepared = intake.prepare(request.input if has_input else None, base, opens_reply=not appends_only)
    return commands.Submit(
        session_id=request.session_id,
        generation_id=request.generation_id,
        built_on_revision=base.revision,
        expected_revision=_expected_revision(request),
        input_ids=prepared.token_ids,
        conversation=prepared.conversation,
        sampling=asked.over(base.defaults).effective(drawn_seed=secrets.randbits(64)),
        stopping=Stopping() if appends_only else stopping,
        keeps_partial=request.cancel_policy == generation_pb2.CANCEL_POLICY_KEEP_PARTIAL,
        received_ns=received_ns,
        appends_only=appends_only,
        priority=request.priority if request.HasField("priority") else None,
        deadline_ns=received_ns + _plain_ns(request.deadline) if request.HasField("deadline") else None,
        queue_timeout_ns=queue_timeout_ns,
        time_limit_ns=time_limit_ns,
    )


def _optional_ns(request: worker_pb2.SubmitRequest, name: str) -> int | None:
    if not request.HasField(name):
        return None
    value: Duration = getattr(request, name)
    return duration_ns(value, name)


def _plain_ns(value: Duration) -> int:
    """A deadline may have passed on its way here: at or below 0 it is over, and no error."""
    return value.seconds * 1_000_000_000 + value.nanos


def _expected_revision(request: worker_pb2.SubmitRequest | worker_pb2.UpdateSessionRequest) -> int | None:
    return request.expected_revision if request.HasField("expected_revision") else None
