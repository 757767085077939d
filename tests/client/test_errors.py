"""Every status and reason becomes the class that the tree promises."""

import re

import grpc
import pytest

import pagecast
from pagecast import _failures, errors
from tests.client.fake_server import FakeServer, Refusal

STATUS = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (STATUS.INVALID_ARGUMENT, "FIELD_OUT_OF_RANGE", pagecast.InvalidArgument),
        (STATUS.NOT_FOUND, "SESSION_NOT_FOUND", pagecast.SessionNotFound),
        (STATUS.NOT_FOUND, "MODEL_NOT_FOUND", pagecast.ModelNotFound),
        (STATUS.NOT_FOUND, "SOMETHING_NEW", pagecast.NotFound),
        (STATUS.ALREADY_EXISTS, "REQUEST_ID_REUSED", pagecast.RequestIdReused),
        (STATUS.ABORTED, "SESSION_BUSY", pagecast.SessionBusy),
        (STATUS.ABORTED, "REVISION_MISMATCH", pagecast.RevisionMismatch),
        (STATUS.FAILED_PRECONDITION, "SESSION_CLOSED", pagecast.SessionClosed),
        (STATUS.FAILED_PRECONDITION, "FINGERPRINT_GONE", pagecast.FailedPrecondition),
        (STATUS.OUT_OF_RANGE, "TOKENS_EXPIRED", pagecast.OutOfRange),
        (STATUS.INVALID_ARGUMENT, "PROMPT_TOO_LONG", pagecast.PromptTooLong),
        (STATUS.FAILED_PRECONDITION, "SESSION_FAILED", pagecast.SessionFailed),
        (STATUS.FAILED_PRECONDITION, "SESSION_EXPIRED", pagecast.SessionExpired),
        (STATUS.RESOURCE_EXHAUSTED, "KV_EXHAUSTED", pagecast.KvExhausted),
        (STATUS.RESOURCE_EXHAUSTED, "QUEUE_FULL", pagecast.QueueFull),
        (STATUS.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT", pagecast.QueueTimeout),
        (STATUS.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", pagecast.QuotaExceeded),
        (STATUS.UNAVAILABLE, "NO_WORKER", pagecast.NoWorker),
        (STATUS.UNAVAILABLE, "WORKER_LOST", pagecast.WorkerLost),
        (STATUS.UNAVAILABLE, "DRAINING", pagecast.Draining),
        (STATUS.UNIMPLEMENTED, "NOT_IMPLEMENTED", pagecast.Unimplemented),
        (STATUS.UNAUTHENTICATED, "TOKEN_INVALID", pagecast.Unauthenticated),
        (STATUS.PERMISSION_DENIED, "SCOPE_MISSING", pagecast.PermissionDenied),
        (STATUS.DATA_LOSS, "JOURNAL_DAMAGED", pagecast.DataLoss),
        (STATUS.INTERNAL, "NUMERIC_FAILURE", pagecast.NumericFailure),
        # A reason under another status than its own must not hide the status.
        (STATUS.UNAVAILABLE, "SESSION_BUSY", pagecast.Unavailable),
    ],
)
def test_class_reason_field_and_metadata(
    fake: FakeServer, code: grpc.StatusCode, reason: str, expected: type[pagecast.PagecastError]
) -> None:
    refusal = Refusal(code, reason, "two of two", "sampling.temperature", {"limit": "2"})
    fake.refusals = {"ListModels": refusal, "Generate": refusal}
    with pagecast.Client(fake.target) as client:
        for call in (client.models, client.session("ses_0").generate("a").wait):
            with pytest.raises(pagecast.PagecastError) as caught:
                call()
            error = caught.value
            assert type(error) is expected
            assert (error.code, error.reason, error.field) == (code, reason, "sampling.temperature")
            assert dict(error.metadata) == {"limit": "2"}
            assert str(error) == f"{reason}: two of two (field sampling.temperature)"


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = {}
    parents = []
    for depth, name in re.findall(
        r"^    ((?:[|] {3})*)(?:\+-- )?([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE
    ):
        level = len(depth) // 4 + (name != "PagecastError")
        parents[level:] = [name]
        drawn[name] = parents[level - 1] if level else "Exception"
    classes = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}
    declared = {n: k.__bases__[0].__name__ for n, k in classes.items() if issubclass(k, errors.PagecastError)}
    assert drawn == declared
    assert all(getattr(pagecast, name) is kind for name, kind in classes.items() if name in declared)


def test_the_field_may_come_as_metadata(fake: FakeServer) -> None:
    fake.refusals["ListModels"] = Refusal(STATUS.UNIMPLEMENTED, "NOT_IMPLEMENTED", metadata={"field": "ttl"})
    with pagecast.Client(fake.target) as client, pytest.raises(pagecast.Unimplemented) as caught:
        client.models()
    assert caught.value.field == "ttl"


def test_a_bare_status_is_its_own_reason(fake: FakeServer) -> None:
    fake.refusals["ListModels"] = Refusal(STATUS.RESOURCE_EXHAUSTED)
    with pagecast.Client(fake.target) as client, pytest.raises(pagecast.ResourceExhausted) as caught:
        client.models()
    assert (caught.value.reason, caught.value.field) == ("RESOURCE_EXHAUSTED", "")


def test_metadata_holds_what_was_sent_alone(fake: FakeServer) -> None:
    for refusal in (
        Refusal(STATUS.ABORTED, "REVISION_MISMATCH", metadata={"revision": "4"}),
        Refusal(STATUS.INVALID_ARGUMENT, "FIELD_INVALID", field="model", metadata={"revision": "4"}),
        Refusal(STATUS.ABORTED, "REVISION_MISMATCH"),
    ):
        fake.refusals["ListModels"] = refusal
        with pagecast.Client(fake.target) as client, pytest.raises(pagecast.PagecastError) as caught:
            client.models()
        assert dict(caught.value.metadata) == refusal.metadata


def test_a_deadline_is_told_in_our_words_unless_the_server_has_better_ones(fake: FakeServer) -> None:
    fake.refusals["ListModels"] = Refusal(STATUS.DEADLINE_EXCEEDED, message="Stream removed")
    with pagecast.Client(fake.target, timeout_s=20) as client:
        for timeout_s, seconds in ((None, "20"), (7.5, "7.5")):
            with pytest.raises(pagecast.DeadlineExceeded, match=f"the deadline of {seconds} s passed"):
                client.models(timeout_s=timeout_s)
        fake.refusals["OpenSession"] = Refusal(STATUS.DEADLINE_EXCEEDED, "QUEUE_TIMEOUT", "waited 3 s")
        with pytest.raises(pagecast.DeadlineExceeded, match=r"^QUEUE_TIMEOUT: waited 3 s$"):
            client.open_session("tiny")
        fake.refusals["OpenSession"] = Refusal(STATUS.CANCELLED, message="RST_STREAM")
        with pytest.raises(pagecast.Cancelled, match=r"^CANCELLED: the call was cancelled$"):
            client.open_session("tiny")


def test_a_deadline_that_is_not_known_is_told_without_its_length() -> None:
    class Call:
        def code(self) -> grpc.StatusCode:
            return STATUS.DEADLINE_EXCEEDED

        def details(self) -> str:
            return "Deadline Exceeded"

        def trailing_metadata(self) -> None:
            return None

    assert str(_failures.decode(Call())) == "DEADLINE_EXCEEDED: the deadline passed"


@pytest.mark.parametrize("payload", [b"\xff\xff", b"\x08\x05\x12\x05other"])
def test_unreadable_or_foreign_details_leave_the_status(payload: bytes) -> None:
    class Call:
        def code(self) -> grpc.StatusCode:
            return STATUS.NOT_FOUND

        def details(self) -> str:
            return "gone"

        def trailing_metadata(self) -> list[tuple[str, bytes]]:
            return [("grpc-status-details-bin", payload)]

    error = _failures.decode(Call())
    assert type(error) is pagecast.NotFound
    assert str(error) == "NOT_FOUND: gone"
