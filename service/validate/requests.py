"""One check per RPC: the order of its rules. The rules themselves are in the files beside."""

from google.protobuf.message import Message

from pagecast.v1 import generation_pb2, model_pb2, session_pb2
from service.errors import PagecastError, Reason
from service.ids import GENERATION_ID
from service.validate.fields import (
    check_duration,
    check_fields,
    check_id,
    check_labels,
    check_optional,
    check_present,
    check_request_id,
    check_session_id,
)
from service.validate.inputs import check_input
from service.validate.limits import AT_LEAST_ONE, PAGE_SIZE
from service.validate.sampling import check_sampling, check_stopping


def not_implemented(rpc: str) -> PagecastError:
    """Return the refusal of an RPC that this version does not have."""
    return PagecastError(
        Reason.NOT_IMPLEMENTED, f"{rpc} is not implemented in this version", metadata={"rpc": rpc}
    )


def check_open_session(request: session_pb2.OpenSessionRequest) -> None:
    """Check a request that opens a session."""
    check_fields(request)
    check_request_id(request)
    check_present(request.model, "model")
    check_optional(request, "max_context_tokens", AT_LEAST_ONE, "max_context_tokens")
    check_sampling(request.default_sampling, "default_sampling")
    if request.HasField("initial_input"):
        check_input(request.initial_input, "initial_input")
    check_labels(request.labels)


def check_get_session(request: session_pb2.GetSessionRequest) -> None:
    """Check a request that reads a session."""
    check_session_id(request.session_id)


def check_list_sessions(request: session_pb2.ListSessionsRequest) -> None:
    """Check a request that lists sessions, but for its token, which is known to who drew it."""
    check_optional(request, "page_size", PAGE_SIZE, "page_size")


def check_update_session(request: session_pb2.UpdateSessionRequest) -> None:
    """Check a request that changes a session."""
    check_fields(request)
    check_request_id(request)
    check_session_id(request.session_id)
    check_labels(request.labels)


def check_append_input(request: session_pb2.AppendInputRequest) -> None:
    """Check a request that appends input without a turn."""
    check_fields(request)
    check_request_id(request)
    check_session_id(request.session_id)
    _check_required_input(request, request.input)


def check_close_session(request: session_pb2.CloseSessionRequest) -> None:
    """Check a request that closes a session."""
    check_request_id(request)
    check_session_id(request.session_id)


def check_generate(request: generation_pb2.GenerateRequest) -> None:
    """Check a request that runs a turn."""
    check_fields(request)
    check_request_id(request)
    check_session_id(request.session_id)
    if request.HasField("input"):
        check_input(request.input)
    check_sampling(request.sampling, "sampling")
    check_stopping(request.stopping)
    check_duration(request, "queue_timeout")
    check_duration(request, "time_limit")
    if request.disconnect_policy == generation_pb2.DISCONNECT_POLICY_CONTINUE:
        raise PagecastError(
            Reason.NOT_IMPLEMENTED,
            "disconnect_policy CONTINUE is not implemented in this version",
            field="disconnect_policy",
        )


def check_cancel_generation(request: generation_pb2.CancelGenerationRequest) -> None:
    """Check a request that cancels a generation."""
    check_request_id(request)
    check_session_id(request.session_id)
    check_id(request.generation_id, GENERATION_ID, "generation_id")


def check_get_model(request: model_pb2.GetModelRequest) -> None:
    """Check a request that reads a model."""
    check_present(request.model, "model")


def check_tokenize(request: model_pb2.TokenizeRequest) -> None:
    """Check a request that turns an input into ids."""
    check_fields(request)
    check_present(request.model, "model")
    _check_required_input(request, request.input)


def check_detokenize(request: model_pb2.DetokenizeRequest) -> None:
    """Check a request that turns ids into text; no ids are no text."""
    check_present(request.model, "model")


def _check_required_input(request: Message, value: session_pb2.Input) -> None:
    if not request.HasField("input"):
        raise PagecastError(Reason.FIELD_REQUIRED, "input is required", field="input")
    check_input(value)
