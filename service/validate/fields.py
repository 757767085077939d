"""Rules on single fields of any message: set, known, of its form, in its range."""

import re
from collections.abc import Mapping

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from service.errors import PagecastError, Reason
from service.ids import SESSION_ID
from service.validate.limits import MAX_DURATION_S, MAX_ITEMS, MAX_LABEL_BYTES, MAX_LABELS, Range

# Fields that this version acts on; any other field that is set is refused, never ignored.
# A message that is not listed is implemented whole.
IMPLEMENTED: Mapping[str, frozenset[str]] = {
    "pagecast.v1.OpenSessionRequest": frozenset(
        {
            "request_id",
            "model",
            "decode_plan",
            "max_context_tokens",
            "default_sampling",
            "initial_input",
            "priority",
            "labels",
        }
    ),
    "pagecast.v1.UpdateSessionRequest": frozenset(
        {"request_id", "session_id", "expected_revision", "decode_plan", "priority", "labels"}
    ),
}
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NANOS_PER_S = 1_000_000_000


def check_fields(message: Message, prefix: str = "") -> None:
    """Refuse fields that are set and not implemented, and enum values without a name, at any depth."""
    implemented = IMPLEMENTED.get(message.DESCRIPTOR.full_name)
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
                check_count(len(value), MAX_ITEMS, path)
                for index, item in enumerate(value):
                    check_fields(item, f"{path}[{index}].")
            else:
                check_fields(value, f"{path}.")


def check_request_id(request: Message) -> None:
    """Refuse a `request_id` that is set and no UUID."""
    name = "request_id"
    if request.HasField(name) and _UUID.fullmatch(getattr(request, name)) is None:
        raise PagecastError(Reason.FIELD_INVALID, f"{name} is no UUID", field=name)


def check_session_id(session_id: str) -> None:
    """Refuse what is no session's id."""
    check_id(session_id, SESSION_ID, "session_id")


def check_id(value: str, form: re.Pattern[str], path: str) -> None:
    """Refuse an id that is absent or not of its form."""
    check_present(value, path)
    if form.fullmatch(value) is None:
        raise PagecastError(Reason.FIELD_INVALID, f"{path} is not an id of this service", field=path)


def check_present(value: str, path: str) -> None:
    """Refuse a string that is absent."""
    if not value:
        raise PagecastError(Reason.FIELD_REQUIRED, f"{path} is required", field=path)


def check_range(value: float, allowed: Range, path: str) -> None:
    """Refuse a number outside `allowed`."""
    if value not in allowed:
        bounds = {"min": f"{allowed.low:g}"} | ({} if allowed.high is None else {"max": f"{allowed.high:g}"})
        raise out_of_range(path, f"must be a number {allowed}", value=f"{value:g}", **bounds)


def check_optional(message: Message, name: str, allowed: Range, path: str) -> None:
    """Refuse a number that is set and outside `allowed`."""
    if message.HasField(name):
        check_range(getattr(message, name), allowed, path)


def check_count(count: int, limit: int, path: str) -> None:
    """Refuse more than `limit` items."""
    if count > limit:
        raise out_of_range(
            path, f"holds {count} items, at most {limit} are taken", count=str(count), max=str(limit)
        )


def check_duration(message: Message, name: str) -> None:
    """Refuse a duration that is set and not over 0, longer than `MAX_DURATION_S`, or not normalised."""
    if not message.HasField(name):
        return
    value: Duration = getattr(message, name)
    has_two_signs = value.seconds * value.nanos < 0
    if abs(value.nanos) >= _NANOS_PER_S or has_two_signs:
        raise PagecastError(Reason.FIELD_INVALID, f"{name} is not a normalised duration", field=name)
    is_over_0 = value.seconds > 0 or value.nanos > 0
    if not is_over_0 or (value.seconds, value.nanos) > (MAX_DURATION_S, 0):
        raise out_of_range(name, f"must be over 0 s and at most {MAX_DURATION_S} s", max=str(MAX_DURATION_S))


def check_labels(labels: Mapping[str, str]) -> None:
    """Refuse labels that are too many or too long, and an empty key."""
    check_count(len(labels), MAX_LABELS, "labels")
    for key, text in labels.items():
        if not key:
            raise PagecastError(Reason.FIELD_INVALID, "labels holds an empty key", field="labels")
        size_bytes = max(len(key.encode()), len(text.encode()))
        if size_bytes > MAX_LABEL_BYTES:
            raise out_of_range(
                "labels",
                f"holds a key or value of {size_bytes} bytes, at most {MAX_LABEL_BYTES} are kept",
                bytes=str(size_bytes),
                max=str(MAX_LABEL_BYTES),
            )


def out_of_range(path: str, text: str, **metadata: str) -> PagecastError:
    """Return the refusal of a value outside its range; `text` follows the path."""
    return PagecastError(Reason.FIELD_OUT_OF_RANGE, f"{path} {text}", field=path, metadata=metadata)


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
