"""Every rule on a request that needs neither tokenizer nor session.

Knows the public messages. Does not know sessions, models or workers: what depends on them
(vocabulary, template, context, revision) the worker checks. Each `check_*` returns None or
raises `PagecastError` naming the field; nothing has changed by then.
"""

import re
from collections.abc import Mapping

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagecast.v1 import generation_pb2, model_pb2, session_pb2
from service.errors import PagecastError, Reason
from service.ids import GENERATION_ID, SESSION_ID

MAX_LABELS = 64
MAX_LABEL_BYTES = 256
MAX_TEMPERATURE = 100.0
# Of a repeated field of messages.
MAX_ITEMS = 4096

# Fields that this version acts on; any other field that is set is refused, never ignored.
# A message that is not listed is implemented whole.
_IMPLEMENTED: Mapping[str, frozenset[str]] = {
    "pagecast.v1.OpenSessionRequest": frozenset(
        {"model", "decode_plan", "max_context_tokens", "default_sampling", "labels"}
    ),
    "pagecast.v1.UpdateSessionRequest": frozenset(
        {"session_id", "expected_revision", "decode_plan", "labels"}
    ),
    "pagecast.v1.CloseSessionRequest": frozenset({"session_id"}),
    "pagecast.v1.GenerateRequest": frozenset(
        {
            "session_id",
            "expected_revision",
            "input",
            "sampling",
            "stopping",
            "response",
            "cancel_policy",
            "disconnect_policy",
        }
    ),
    "pagecast.v1.CancelGenerationRequest": frozenset({"session_id", "generation_id"}),
    "pagecast.v1.SamplingParams": frozenset({"temperature", "seed"}),
    "pagecast.v1.StoppingCriteria": frozenset({"max_tokens"}),
}


def not_implemented(rpc: str) -> PagecastError:
    """Return the refusal of an RPC that this version does not have."""
    return PagecastError(
        Reason.NOT_IMPLEMENTED, f"{rpc} is not implemented in this version", metadata={"rpc": rpc}
    )


def check_open_session(request: session_pb2.OpenSessionRequest) -> None:
    """Check a request that opens a session."""
    _check_fields(request)
    _check_model_name(request.model)
    _check_at_least_one(request, "max_context_tokens", "max_context_tokens")
    _check_sampling(request.default_sampling, "default_sampling")
    _check_labels(request.labels)


def check_get_session(request: session_pb2.GetSessionRequest) -> None:
    """Check a request that reads a session."""
    _check_id(request.session_id, SESSION_ID, "session_id")


def check_update_session(request: session_pb2.UpdateSessionRequest) -> None:
    """Check a request that changes a session."""
    _check_fields(request)
    _check_id(request.session_id, SESSION_ID, "session_id")
    _check_labels(request.labels)


def check_close_session(request: session_pb2.CloseSessionRequest) -> None:
    """Check a request that closes a session."""
    _check_fields(request)
    _check_id(request.session_id, SESSION_ID, "session_id")


def check_generate(request: generation_pb2.GenerateRequest) -> None:
    """Check a request that runs a turn."""
    _check_fields(request)
    _check_id(request.session_id, SESSION_ID, "session_id")
    if request.HasField("input"):
        _check_input(request.input)
    _check_sampling(request.sampling, "sampling")
    _check_at_least_one(request.stopping, "max_tokens", "stopping.max_tokens")
    if request.disconnect_policy == generation_pb2.DISCONNECT_POLICY_CONTINUE:
        raise PagecastError(
            Reason.NOT_IMPLEMENTED,
            "disconnect_policy CONTINUE is not implemented in this version",
            field="disconnect_policy",
        )


def check_cancel_generation(request: generation_pb2.CancelGenerationRequest) -> None:
    """Check a request that cancels a generation."""
    _check_fields(request)
    _check_id(request.session_id, SESSION_ID, "session_id")
    _check_id(request.generation_id, GENERATION_ID, "generation_id")


def check_get_model(request: model_pb2.GetModelRequest) -> None:
    """Check a request that reads a model."""
    _check_model_name(request.model)


def _check_fields(message: Message, prefix: str = "") -> None:
    """Refuse fields that are set and not implemented, and enum values without a name, at any depth."""
    implemented = _IMPLEMENTED.get(message.DESCRIPTOR.full_name)
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        if implemented is not None and field.name not in implemented:
            raise PagecastError(
                Reason.NOT_IMPLEMENTED, f"{path} is not implemented in this version", field=path
            )
        if field.type == FieldDescriptor.TYPE_ENUM:
            _check_enum(field, value, path)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field):
            if field.is_repeated:
                # Counted before any of them is looked at: the walk holds up every other call.
                if len(value) > MAX_ITEMS:
                    raise PagecastError(
                        Reason.FIELD_OUT_OF_RANGE,
                        f"{path} holds {len(value)} items, at most {MAX_ITEMS} are taken",
                        field=path,
                        metadata={"max": str(MAX_ITEMS)},
                    )
                for index, item in enumerate(value):
                    _check_fields(item, f"{path}[{index}].")
            else:
                _check_fields(value, f"{path}.")


def _is_map(field: FieldDescriptor) -> bool:
    entry = field.message_type
    return entry is not None and entry.GetOptions().map_entry


def _check_enum(field: FieldDescriptor, value: int, path: str) -> None:
    """Refuse a number that the enum does not name: proto3 hands unknown ones through."""
    if field.enum_type is not None and value not in field.enum_type.values_by_number:
        raise PagecastError(
            Reason.FIELD_INVALID, f"{path} has a value that this version does not know", field=path,
            metadata={"value": str(value)},
        )  # fmt: skip


def _check_id(value: str, form: re.Pattern[str], path: str) -> None:
    if not value:
        raise PagecastError(Reason.FIELD_REQUIRED, f"{path} is required", field=path)
    if form.fullmatch(value) is None:
        raise PagecastError(Reason.FIELD_INVALID, f"{path} is not an id of this service", field=path)


def _check_model_name(name: str) -> None:
    if not name:
        raise PagecastError(Reason.FIELD_REQUIRED, "model is required", field="model")


def _check_at_least_one(message: Message, name: str, path: str) -> None:
    if message.HasField(name) and getattr(message, name) == 0:
        raise PagecastError(
            Reason.FIELD_OUT_OF_RANGE, f"{path} must be at least 1", field=path, metadata={"min": "1"}
        )


def _check_sampling(sampling: session_pb2.SamplingParams, path: str) -> None:
    temperature = sampling.temperature
    # NaN compares false with everything, so the accepted range is what is tested.
    if not 0.0 <= temperature <= MAX_TEMPERATURE:
        field = f"{path}.temperature"
        raise PagecastError(
            Reason.FIELD_OUT_OF_RANGE,
            f"{field} must be a number from 0 to {MAX_TEMPERATURE:g}",
            field=field,
            metadata={"value": str(temperature), "min": "0", "max": f"{MAX_TEMPERATURE:g}"},
        )


def _check_input(value: session_pb2.Input) -> None:
    """Refuse an input that is present and holds nothing, and messages of no role."""
    content = value.WhichOneof("content")
    match content:
        case None:
            raise _empty("input")
        case "text":
            if not value.text:
                raise _empty("input.text")
        case "token_ids":
            if not value.token_ids.ids:
                raise _empty("input.token_ids.ids")
        case "messages":
            if not value.messages.messages:
                raise _empty("input.messages.messages")
            for index, message in enumerate(value.messages.messages):
                if message.role == session_pb2.ROLE_UNSPECIFIED:
                    path = f"input.messages.messages[{index}].role"
                    raise PagecastError(Reason.FIELD_REQUIRED, f"{path} is required", field=path)
                # An empty system message is an answer to the template's own; an empty question is none.
                if message.role == session_pb2.ROLE_USER and not message.content:
                    raise _empty(f"input.messages.messages[{index}].content")


def _empty(path: str) -> PagecastError:
    return PagecastError(
        Reason.INPUT_EMPTY, f"{path} is empty; leave input out to continue the log", field=path
    )


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > MAX_LABELS:
        raise PagecastError(
            Reason.FIELD_OUT_OF_RANGE,
            f"labels holds {len(labels)} keys, at most {MAX_LABELS} are kept",
            field="labels",
            metadata={"count": str(len(labels)), "max": str(MAX_LABELS)},
        )
    for key, text in labels.items():
        if not key:
            raise PagecastError(Reason.FIELD_INVALID, "labels holds an empty key", field="labels")
        size_bytes = max(len(key.encode()), len(text.encode()))
        if size_bytes > MAX_LABEL_BYTES:
            raise PagecastError(
                Reason.FIELD_OUT_OF_RANGE,
                f"labels holds a key or value of {size_bytes} bytes, at most {MAX_LABEL_BYTES} are kept",
                field="labels",
                metadata={"bytes": str(size_bytes), "max": str(MAX_LABEL_BYTES)},
            )
