"""What a failed call raises. Knows no call: `_failures` makes these of statuses.

    PagecastError                  code, reason, field, message, metadata
    +-- InvalidArgument            a field is wrong; `field` names it
    |   +-- PromptTooLong
    +-- NotFound
    |   +-- SessionNotFound
    |   +-- ModelNotFound
    |   +-- GenerationNotFound
    +-- AlreadyExists
    |   +-- RequestIdReused
    +-- Aborted                    changed nothing; may be tried again
    |   +-- SessionBusy
    |   +-- RevisionMismatch
    +-- FailedPrecondition
    |   +-- SessionClosed
    |   +-- SessionExpired
    |   +-- SessionFailed
    +-- OutOfRange
    +-- ResourceExhausted
    |   +-- KvExhausted
    |   +-- QueueFull
    |   +-- QueueTimeout
    |   +-- QuotaExceeded
    +-- Unavailable                no server answers, or it cannot serve now
    |   +-- Draining
    |   +-- NoWorker
    |   +-- WorkerLost
    +-- Unimplemented
    +-- Unauthenticated
    +-- PermissionDenied
    +-- DeadlineExceeded
    +-- Cancelled                  cancelled on this side
    +-- DataLoss
    +-- Internal
    |   +-- NumericFailure
    +-- BrokenStream               the stream's events do not fit together

A class covers its status; a reason without a class of its own raises its status's class.
"""

from collections.abc import Mapping
from types import MappingProxyType

import grpc


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


class PromptTooLong(InvalidArgument):
    """The session's context has no room for a token after the input."""


class NotFound(PagecastError):
    """Nothing of that name or id."""


class SessionNotFound(NotFound):
    """No such session."""


class ModelNotFound(NotFound):
    """No such model is served."""


class GenerationNotFound(NotFound):
    """Nothing of that id runs."""


class AlreadyExists(PagecastError):
    """What the call would make is there, and differs."""


class RequestIdReused(AlreadyExists):
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
    """The session's worker is gone, its log with it; it can only be closed."""


class OutOfRange(PagecastError):
    """The tokens asked for are no longer kept."""


class ResourceExhausted(PagecastError):
    """KV memory, a queue, a quota or a waiting time is used up."""


class KvExhausted(ResourceExhausted):
    """The KV pool is full of what cannot be reclaimed."""


class QueueFull(ResourceExhausted):
    """As many turns wait as may."""


class QueueTimeout(ResourceExhausted):
    """The turn's `queue_timeout_s` passed before its first step."""


class QuotaExceeded(ResourceExhausted):
    """As many sessions as may have what was asked for; `metadata` names the limit.

    A worker takes so many sessions in REPLAN. Nothing was opened or changed.
    """


class Unavailable(PagecastError):
    """No server answers (reason UNAVAILABLE), or it cannot serve now."""


class Draining(Unavailable):
    """The server is being stopped and takes nothing new."""


class NoWorker(Unavailable):
    """No live worker serves the model."""


class WorkerLost(Unavailable):
    """The session's worker ended during the call."""


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


class NumericFailure(Internal):
    """The model's logits were not finite numbers."""


class BrokenStream(PagecastError):
    """The stream skipped a token or ended without its last event."""
