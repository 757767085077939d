"""Makes the exception of a failed call. Knows the statuses and reasons of the public API, no requests."""

from collections.abc import Mapping
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagecast import errors


class _Call(Protocol):
    """What `grpc.Call` and `grpc.aio.AioRpcError` share."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...


_BY_CODE: Mapping[grpc.StatusCode, type[errors.PagecastError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.ABORTED: errors.Aborted,
    grpc.StatusCode.FAILED_PRECONDITION: errors.FailedPrecondition,
    grpc.StatusCode.OUT_OF_RANGE: errors.OutOfRange,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unimplemented,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.DATA_LOSS: errors.DataLoss,
    grpc.StatusCode.INTERNAL: errors.Internal,
    grpc.StatusCode.UNKNOWN: errors.Internal,
}
_BY_REASON: Mapping[str, type[errors.PagecastError]] = {
    "PROMPT_TOO_LONG": errors.PromptTooLong,
    "SESSION_NOT_FOUND": errors.SessionNotFound,
    "MODEL_NOT_FOUND": errors.ModelNotFound,
    "GENERATION_NOT_FOUND": errors.GenerationNotFound,
    "REQUEST_ID_REUSED": errors.RequestIdReused,
    "SESSION_BUSY": errors.SessionBusy,
    "REVISION_MISMATCH": errors.RevisionMismatch,
    "SESSION_CLOSED": errors.SessionClosed,
    "SESSION_EXPIRED": errors.SessionExpired,
    "SESSION_FAILED": errors.SessionFailed,
    "KV_EXHAUSTED": errors.KvExhausted,
    "QUEUE_FULL": errors.QueueFull,
    "QUEUE_TIMEOUT": errors.QueueTimeout,
    "QUOTA_EXCEEDED": errors.QuotaExceeded,
    "DRAINING": errors.Draining,
    "NO_WORKER": errors.NoWorker,
    "NUMERIC_FAILURE": errors.NumericFailure,
    "WORKER_LOST": errors.WorkerLost,
}


def decode(call: _Call, timeout_s: float | None = None) -> errors.PagecastError:
    """The exception for a failed call: from its `google.rpc` details, or its bare status without them.

    Args:
        call: The call that failed.
        timeout_s: The deadline that it had, in seconds; None: none or not known.
    """
    code, message = call.code(), call.details() or ""
    info, violations = _details(call)
    reason = info.reason
    if not reason:  # the transport's own words tell how it works, not what happened
        if code is grpc.StatusCode.CANCELLED:
            return cancelled()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            message = f"the deadline{'' if timeout_s is None else f' of {timeout_s:g} s'} passed"
    # `get`: reading a key that a protobuf map lacks would add it.
    named = info.metadata.get("field", "")
    field = violations.field_violations[0].field if violations.field_violations else named
    kind = _BY_CODE.get(code, errors.PagecastError)
    by_reason = _BY_REASON.get(reason, kind)
    # A reason refines its own status only: `except errors.Unavailable` must catch every UNAVAILABLE.
    kind = by_reason if issubclass(by_reason, kind) else kind
    return kind(message, code=code, reason=reason, field=field, metadata=dict(info.metadata))


def cancelled() -> errors.Cancelled:
    """The exception for a call that was cancelled on this side."""
    return errors.Cancelled("the call was cancelled", code=grpc.StatusCode.CANCELLED)


def _details(call: _Call) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.BadRequest]:
    """The call's ErrorInfo and BadRequest, empty where absent or unreadable."""
    info, violations = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    try:
        status = rpc_status.from_call(call)
        for detail in status.details if status else ():
            # Unpack copies when the type fits and does nothing when it does not.
            detail.Unpack(info)
            detail.Unpack(violations)
    except (ValueError, DecodeError):  # a proxy rewrote the status: what it says still holds
        return error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    return info, violations
