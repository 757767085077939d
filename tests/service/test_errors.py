import re
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from pagecast.worker.v1 import worker_pb2
from service.errors import _RULES, PagecastError, Reason, from_refusal, to_status

DETAILS = {
    "INVALID_ARGUMENT": error_details_pb2.BadRequest,
    "NOT_FOUND": error_details_pb2.ResourceInfo,
    "FAILED_PRECONDITION": error_details_pb2.PreconditionFailure,
    "RESOURCE_EXHAUSTED": error_details_pb2.QuotaFailure,
}


def unpack(status: grpc.Status) -> status_pb2.Status:
    ((key, value),) = status.trailing_metadata
    assert key == "grpc-status-details-bin"
    return status_pb2.Status.FromString(value)


def test_every_reason_has_a_rule() -> None:
    assert set(_RULES) == set(Reason)


TABLE = {
    "INVALID_ARGUMENT": (
        "FIELD_REQUIRED", "FIELD_INVALID", "FIELD_OUT_OF_RANGE", "INPUT_EMPTY", "PROMPT_TOO_LONG",
        "TEMPLATE_ERROR", "MALFORMED_MESSAGE",
    ),
    "NOT_FOUND": ("SESSION_NOT_FOUND", "MODEL_NOT_FOUND", "GENERATION_NOT_FOUND"),
    "ALREADY_EXISTS": ("REQUEST_ID_REUSED",),
    "ABORTED": ("SESSION_BUSY", "REVISION_MISMATCH"),
    "FAILED_PRECONDITION": (
        "SESSION_EXPIRED", "SESSION_FAILED", "SESSION_CLOSED", "FINGERPRINT_GONE", "MIXED_INPUT",
        "TEMPLATE_NOT_INCREMENTAL",
    ),
    "OUT_OF_RANGE": ("TOKENS_EXPIRED",),
    "RESOURCE_EXHAUSTED": ("KV_EXHAUSTED", "QUEUE_FULL", "QUOTA_EXCEEDED", "QUEUE_TIMEOUT"),
    "UNAVAILABLE": ("NO_WORKER", "DRAINING", "WORKER_LOST"),
    "DEADLINE_EXCEEDED": ("DEADLINE_EXCEEDED",),
    "CANCELLED": ("CANCELLED",),
    "UNAUTHENTICATED": ("TOKEN_MISSING", "TOKEN_INVALID"),
    "PERMISSION_DENIED": ("SCOPE_MISSING",),
    "INTERNAL": ("NUMERIC_FAILURE", "QUARANTINED", "INTERNAL"),
    "DATA_LOSS": ("JOURNAL_DAMAGED",),
    "UNIMPLEMENTED": ("NOT_IMPLEMENTED",),
}  # fmt: skip


def test_every_reason_has_the_status_that_the_api_promises() -> None:
    promised = {reason: status for status, reasons in TABLE.items() for reason in reasons}
    assert {reason.value: PagecastError(reason, "").status.name for reason in Reason} == promised


@pytest.mark.parametrize("reason", [Reason.SESSION_BUSY, Reason.NO_WORKER, Reason.DRAINING])
def test_what_passes_by_itself_says_when_to_try_again(reason: Reason) -> None:
    whole = unpack(to_status(PagecastError(reason, "later")))
    retry = error_details_pb2.RetryInfo()
    assert whole.details[1].Unpack(retry)
    assert retry.retry_delay.seconds > 0


def test_every_reason_that_a_worker_gives_is_in_the_table() -> None:
    sources = [path.read_text() for path in (Path(__file__).parents[2] / "worker").rglob("*.py")]
    given = {reason for source in sources for reason in re.findall(r'Refused\(\s*"([A-Z_]+)"', source)}
    assert len(given) > 5
    # One never leaves the worker; the other takes a gateway that draws an id twice.
    assert given - {"STALE_BASE", "SESSION_EXISTS"} <= set(Reason)


@pytest.mark.parametrize("reason", list(Reason))
def test_details_of_any_length_stay_under_1_kib(reason: Reason) -> None:
    error = PagecastError(
        reason,
        "é" * 5000,
        field="f" * 5000,
        metadata={f"{index}{'k' * 500}": "\N{SNOWMAN}" * 5000 for index in range(50)},
    )
    status = to_status(error)
    assert status.code is error.status
    whole = unpack(status)
    assert whole.ByteSize() < 1024
    assert whole.message == status.details
    info = error_details_pb2.ErrorInfo()
    assert whole.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason.value, "pagecast")
    if status.code.name in DETAILS:
        assert whole.details[1].Is(DETAILS[status.code.name].DESCRIPTOR)


def test_a_field_at_fault_is_named_twice() -> None:
    error = PagecastError(
        Reason.FIELD_OUT_OF_RANGE, "too hot", field="sampling.temperature", metadata={"max": "100"}
    )
    whole = unpack(to_status(error))
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert whole.details[0].Unpack(info)
    assert whole.details[1].Unpack(bad)
    assert dict(info.metadata) == {"field": "sampling.temperature", "max": "100"}
    assert bad.field_violations[0].field == "sampling.temperature"
    assert bad.field_violations[0].description == "too hot"


def test_refusals_keep_what_they_say() -> None:
    refusal = worker_pb2.Refusal(
        reason="REVISION_MISMATCH", field="expected_revision", message="m", metadata={"revision": "3"}
    )
    error = from_refusal(refusal)
    assert (error.reason, error.field, error.message) == (Reason.REVISION_MISMATCH, "expected_revision", "m")
    assert error.metadata == {"revision": "3"}
    assert error.status is grpc.StatusCode.ABORTED


def test_a_refusal_of_unknown_reason_is_a_bug() -> None:
    with pytest.raises(ValueError, match="NEW_REASON"):
        from_refusal(worker_pb2.Refusal(reason="NEW_REASON"))
