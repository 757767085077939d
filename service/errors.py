"""The only table from a reason to a gRPC status and its `google.rpc` details.

Knows the error model of the public API and nothing of who raises what. Raise `PagecastError`
anywhere under a handler; `service.interceptors` turns it into the status that `to_status` builds.

    Exception
    ├── PagecastError   a refusal or failure with a reason, told to the caller
    └── StartError      the gateway cannot start; one sentence for the operator
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagecast.worker.v1 import worker_pb2

DOMAIN = "pagecast"
# With these limits all details together stay under 1 KiB; gRPC replaces a status whose
# details outgrow the peer's header limit by RESOURCE_EXHAUSTED.
MAX_MESSAGE_BYTES = 160
MAX_FIELD_BYTES = 96
MAX_METADATA_ENTRIES = 4
MAX_METADATA_KEY_BYTES = 24
MAX_METADATA_VALUE_BYTES = 48


class Reason(StrEnum):
    """Every reason that an `ErrorInfo` of this service can carry."""

    FIELD_REQUIRED = "FIELD_REQUIRED"
    FIELD_INVALID = "FIELD_INVALID"
    FIELD_OUT_OF_RANGE = "FIELD_OUT_OF_RANGE"
    INPUT_EMPTY = "INPUT_EMPTY"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    TEMPLATE_ERROR = "TEMPLATE_ERROR"
    TEMPLATE_NOT_INCREMENTAL = "TEMPLATE_NOT_INCREMENTAL"
    MIXED_INPUT = "MIXED_INPUT"
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    NOT_IMPLEMENTED = "NOT_IMPLEMENTED"
    SESSION_NOT_FOUND = "SESSION_NOT_FOUND"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    GENERATION_NOT_FOUND = "GENERATION_NOT_FOUND"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    SESSION_BUSY = "SESSION_BUSY"
    REVISION_MISMATCH = "REVISION_MISMATCH"
    SESSION_EXPIRED = "SESSION_EXPIRED"
    SESSION_FAILED = "SESSION_FAILED"
    SESSION_CLOSED = "SESSION_CLOSED"
    TOKENS_EXPIRED = "TOKENS_EXPIRED"
    KV_EXHAUSTED = "KV_EXHAUSTED"
    QUEUE_FULL = "QUEUE_FULL"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    NO_WORKER = "NO_WORKER"
    DRAINING = "DRAINING"
    WORKER_LOST = "WORKER_LOST"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    TOKEN_MISSING = "TOKEN_MISSING"  # noqa: S105  a reason, no secret
    TOKEN_INVALID = "TOKEN_INVALID"  # noqa: S105  a reason, no secret
    SCOPE_MISSING = "SCOPE_MISSING"
    NUMERIC_FAILURE = "NUMERIC_FAILURE"
    QUARANTINED = "QUARANTINED"
    FINGERPRINT_GONE = "FINGERPRINT_GONE"
    JOURNAL_DAMAGED = "JOURNAL_DAMAGED"
    INTERNAL = "INTERNAL"


class _Detail(Enum):
    """Which message goes into the status beside `ErrorInfo`."""

    NONE = "none"
    BAD_REQUEST = "bad_request"
    RESOURCE = "resource"
    PRECONDITION = "precondition"
    QUOTA = "quota"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class _Rule:
    status: grpc.StatusCode
    detail: _Detail = _Detail.NONE
    subject: str = ""  # type of the resource, or what the quota or precondition is about
    retry_s: int = 0


_BAD = _Rule(grpc.StatusCode.INVALID_ARGUMENT, _Detail.BAD_REQUEST)
_NO_SESSION = _Rule(grpc.StatusCode.NOT_FOUND, _Detail.RESOURCE, "session")
_NO_MODEL = _Rule(grpc.StatusCode.NOT_FOUND, _Detail.RESOURCE, "model")
_NO_GENERATION = _Rule(grpc.StatusCode.NOT_FOUND, _Detail.RESOURCE, "generation")
_SESSION_STATE = _Rule(grpc.StatusCode.FAILED_PRECONDITION, _Detail.PRECONDITION, "session")
_UNAUTHENTICATED = _Rule(grpc.StatusCode.UNAUTHENTICATED)
_INTERNAL = _Rule(grpc.StatusCode.INTERNAL)

_RULES: Mapping[Reason, _Rule] = {
    Reason.FIELD_REQUIRED: _BAD,
    Reason.FIELD_INVALID: _BAD,
    Reason.FIELD_OUT_OF_RANGE: _BAD,
    Reason.INPUT_EMPTY: _BAD,
    Reason.PROMPT_TOO_LONG: _BAD,
    Reason.TEMPLATE_ERROR: _BAD,
    Reason.MALFORMED_MESSAGE: _BAD,
    # Another session, or another form of input, would be served: the state is at fault.
    Reason.TEMPLATE_NOT_INCREMENTAL: _SESSION_STATE,
    Reason.MIXED_INPUT: _SESSION_STATE,
    Reason.NOT_IMPLEMENTED: _Rule(grpc.StatusCode.UNIMPLEMENTED),
    Reason.SESSION_NOT_FOUND: _NO_SESSION,
    Reason.MODEL_NOT_FOUND: _NO_MODEL,
    Reason.GENERATION_NOT_FOUND: _NO_GENERATION,
    Reason.REQUEST_ID_REUSED: _Rule(grpc.StatusCode.ALREADY_EXISTS),
    Reason.SESSION_BUSY: _Rule(grpc.StatusCode.ABORTED, _Detail.RETRY, retry_s=1),
    Reason.REVISION_MISMATCH: _Rule(grpc.StatusCode.ABORTED, _Detail.PRECONDITION, "session"),
    Reason.SESSION_EXPIRED: _SESSION_STATE,
    Reason.SESSION_FAILED: _SESSION_STATE,
    Reason.SESSION_CLOSED: _SESSION_STATE,
    Reason.TOKENS_EXPIRED: _Rule(grpc.StatusCode.OUT_OF_RANGE),
    Reason.KV_EXHAUSTED: _Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, _Detail.QUOTA, "kv_blocks"),
    Reason.QUEUE_FULL: _Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, _Detail.QUOTA, "queue"),
    Reason.QUEUE_TIMEOUT: _Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, _Detail.QUOTA, "queue"),
    Reason.QUOTA_EXCEEDED: _Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, _Detail.QUOTA, "sessions"),
    Reason.NO_WORKER: _Rule(grpc.StatusCode.UNAVAILABLE, _Detail.RETRY, retry_s=5),
    Reason.DRAINING: _Rule(grpc.StatusCode.UNAVAILABLE, _Detail.RETRY, retry_s=5),
    # No RetryInfo: what the worker held is gone, so the same call does not succeed later.
    Reason.WORKER_LOST: _Rule(grpc.StatusCode.UNAVAILABLE),
    Reason.DEADLINE_EXCEEDED: _Rule(grpc.StatusCode.DEADLINE_EXCEEDED),
    Reason.CANCELLED: _Rule(grpc.StatusCode.CANCELLED),
    Reason.TOKEN_MISSING: _UNAUTHENTICATED,
    Reason.TOKEN_INVALID: _UNAUTHENTICATED,
    Reason.SCOPE_MISSING: _Rule(grpc.StatusCode.PERMISSION_DENIED),
    Reason.NUMERIC_FAILURE: _INTERNAL,
    Reason.QUARANTINED: _INTERNAL,
    Reason.FINGERPRINT_GONE: _SESSION_STATE,
    Reason.JOURNAL_DAMAGED: _Rule(grpc.StatusCode.DATA_LOSS),
    Reason.INTERNAL: _INTERNAL,
}


class StartError(Exception):
    """The gateway cannot start; the text is one sentence for whoever started it."""


class PagecastError(Exception):
    """A call that is refused or failed, as its caller is to see it.

    Attributes:
        reason: The `ErrorInfo` reason; decides the status.
        message: One sentence for the caller; holds no path, address, prompt or exception text.
        field: Path of the request field at fault, e.g. `sampling.temperature`; empty where none is.
        metadata: Numbers and names that belong to it, e.g. `{"limit": "64"}`.
    """

    def __init__(
        self, reason: Reason, message: str, *, field: str = "", metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.field = field
        self.metadata: Mapping[str, str] = dict(metadata or {})

    @property
    def status(self) -> grpc.StatusCode:
        """The gRPC status that the reason maps to."""
        return _RULES[self.reason].status


def from_refusal(refusal: worker_pb2.Refusal) -> PagecastError:
    """Turn a worker's refusal into the error its caller sees.

    Raises:
        ValueError: The reason is none of `Reason`; a worker of this version never sends one.
    """
    reason = Reason(refusal.reason)
    return PagecastError(reason, refusal.message, field=refusal.field, metadata=dict(refusal.metadata))


def to_status(error: PagecastError) -> grpc.Status:
    """Build the status of `error` with `ErrorInfo` and the detail of its rule, under 1 KiB in all."""
    rule = _RULES[error.reason]
    message = cut(error.message, MAX_MESSAGE_BYTES)
    details: list[Message] = [_error_info(error)]
    extra = _detail(rule, error, message)
    if extra is not None:
        details.append(extra)
    packed = []
    for detail in details:
        wrapper = AnyMessage()
        wrapper.Pack(detail)
        packed.append(wrapper)
    code: int = rule.status.value[0]
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code, message=message, details=packed))
    return status


def _error_info(error: PagecastError) -> Message:
    metadata = {"field": cut(error.field, MAX_FIELD_BYTES)} if error.field else {}
    for key, value in error.metadata.items():
        if len(metadata) == MAX_METADATA_ENTRIES:
            break
        metadata.setdefault(cut(key, MAX_METADATA_KEY_BYTES), cut(value, MAX_METADATA_VALUE_BYTES))
    info: Message = error_details_pb2.ErrorInfo(reason=str(error.reason), domain=DOMAIN, metadata=metadata)
    return info


def _detail(rule: _Rule, error: PagecastError, message: str) -> Message | None:
    """Return the message that the rule puts beside `ErrorInfo`; None where it puts none."""
    detail: Message | None = None
    match rule.detail:
        case _Detail.NONE:
            pass
        case _Detail.BAD_REQUEST:
            field = cut(error.field, MAX_FIELD_BYTES)
            if field:
                detail = error_details_pb2.BadRequest(
                    field_violations=[{"field": field, "description": message}]
                )
        case _Detail.RESOURCE:
            name = cut(error.metadata.get(rule.subject, ""), MAX_METADATA_VALUE_BYTES)
            detail = error_details_pb2.ResourceInfo(resource_type=rule.subject, resource_name=name)
        case _Detail.PRECONDITION:
            unmet = {"type": str(error.reason), "subject": rule.subject, "description": message}
            detail = error_details_pb2.PreconditionFailure(violations=[unmet])
        case _Detail.QUOTA:
            full = {"subject": rule.subject, "description": message}
            detail = error_details_pb2.QuotaFailure(violations=[full])
        case _Detail.RETRY:
            detail = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=rule.retry_s))
    return detail


def cut(text: str, limit_bytes: int) -> str:
    """Cut to at most `limit_bytes` of UTF-8, at a character's border."""
    return text.encode()[:limit_bytes].decode(errors="ignore")
