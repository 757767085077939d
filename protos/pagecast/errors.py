"""What a failed call raises. Knows the statuses and reasons of the public API, no requests.

    PagecastError                  code, reason, field, message, metadata
    +-- InvalidArgument            a field is wrong; `field` names it
    +-- NotFound
    |   +-- SessionNotFound
    |   +-- ModelNotFound
    |   +-- GenerationNotFound
    +-- AlreadyExists
    +-- Aborted                    changed nothing; may be tried again
    |   +-- SessionBusy
    |   +-- RevisionMismatch
    +-- FailedPrecondition
    |   +-- SessionClosed
    |   +-- SessionExpired
    |   +-- SessionFailed
    +-- OutOfRange
    +-- ResourceExhausted
    +-- Unavailable                no server, or it has no worker
    |   +-- WorkerLost
    +-- Unimplemented
    +-- Unauthenticated
    +-- PermissionDenied
    +-- DeadlineExceeded
    +-- Cancelled                  cancelled on this side
    +-- DataLoss
    +-- Internal
    +-- BrokenStream               the stream's events do not fit together

A class covers its status; a reason without a class of its own raises its status's class.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status


class PagecastError(Exception):
    """A call that failed; what it would have changed is unchanged unless the message says so.

    Attributes:
        code: The gRPC status.
        reason: UPPER_SNAKE reason of the public API, or the status's name where the failure came
            from the transport and carries no details.
        field: Path of the request field at fault, empty where none is.
        message: One sentence.
        metadata: Numbers and names that belong to the reason, as text.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode,
        reason: str = "",
        field: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.code = code
        self.reason = reason or code.name
        self.field = field
        self.message = message
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata or {}))
        super().__init__(message)

    def __str__(self) -> str:
        where = f" (field {self.field})" if self.field else ""
        return f"{self.reason}: {self.message}{where}"


class InvalidArgument(PagecastError):
    """A field of the request is wrong; `field` names it."""


class NotFound(PagecastError):
    """Nothing of that name or id."""


class SessionNotFound(NotFound):
    """No such session."""


class ModelNotFound(NotFound):
    """No such model is served."""


class GenerationNotFound(NotFound):
    """Nothing of that id runs."""


class AlreadyExists(PagecastError):
    """The request id was used with another payload."""


class Aborted(PagecastError):
    """The call met another one and changed nothing; it may be tried again."""


class SessionBusy(Aborted):
    """The session runs a generation already."""


class RevisionMismatch(Aborted):
    """The session's revision is not the expected one."""


class FailedPrecondition(PagecastError):
    """The session or model is not in a state that allows the call."""


class SessionClosed(FailedPrecondition):
    """The session has been closed."""


class SessionExpired(FailedPrecondition):
    """The session's idle time ran out."""


class SessionFailed(FailedPrecondition):
    """The session cannot go on."""


class OutOfRange(PagecastError):
    """The tokens asked for are no longer kept."""


class ResourceExhausted(PagecastError):
    """KV memory, a queue, a quota or a waiting time is used up."""


class Unavailable(PagecastError):
    """No server answers (reason UNAVAILABLE), or it cannot serve now."""


class WorkerLost(Unavailable):
    """The session's worker is gone."""


class Unimplemented(PagecastError):
    """The server does not implement the call, or a field that was set."""


class Unauthenticated(PagecastError):
    """No credentials, or bad ones."""


class PermissionDenied(PagecastError):
    """The caller may not do this."""


class DeadlineExceeded(PagecastError):
    """The call's `timeout_s` passed."""


class Cancelled(PagecastError):
    """The call was cancelled on this side."""


class DataLoss(PagecastError):
    """The session's stored log is damaged."""


class Internal(PagecastError):
    """The server failed; metadata may hold an error id to look for in its log."""


class BrokenStream(PagecastError):
    """The stream skipped a token or ended without its last event."""


class _Call(Protocol):
    """What `grpc.Call` and `grpc.aio.AioRpcError` share."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...


_BY_CODE: Mapping[grpc.StatusCode, type[PagecastError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DATA_LOSS: DataLoss,
    grpc.StatusCode.INTERNAL: Internal,
    grpc.StatusCode.UNKNOWN: Internal,
}
_BY_REASON: Mapping[str, type[PagecastError]] = {
    "SESSION_NOT_FOUND": SessionNotFound,
    "MODEL_NOT_FOUND": ModelNotFound,
    "GENERATION_NOT_FOUND": GenerationNotFound,
    "SESSION_BUSY": SessionBusy,
    "REVISION_MISMATCH": RevisionMismatch,
    "SESSION_CLOSED": SessionClosed,
    "SESSION_EXPIRED": SessionExpired,
    "SESSION_FAILED": SessionFailed,
    "WORKER_LOST": WorkerLost,
}


def decode(call: _Call, timeout_s: float | None = None) -> PagecastError:
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
    field = violations.field_violations[0].field if violations.field_violations else info.metadata["field"]
    kind = _BY_CODE.get(code, PagecastError)
    by_reason = _BY_REASON.get(reason, kind)
    # A reason refines its own status only: `except Unavailable` must catch every UNAVAILABLE.
    kind = by_reason if issubclass(by_reason, kind) else kind
    return kind(message, code=code, reason=reason, field=field, metadata=dict(info.metadata))


def cancelled() -> Cancelled:
    """The exception for a call that was cancelled on this side."""
    return Cancelled("the call was cancelled", code=grpc.StatusCode.CANCELLED)


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
