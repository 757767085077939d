"""Messages as what JSON can hold. Knows no particular message but the well-known times."""

from datetime import UTC
from typing import Any

import orjson
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp


def record(message: Message) -> dict[str, Any]:
    """Every field by name; an absent one that can be absent is None.

    Enum values come by their names without the enum's own, times in ISO 8601, 64-bit numbers as numbers.
    """
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def json_line(value: dict[str, Any]) -> str:
    """One line of JSON, newline included."""
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE).decode()


def enum_name(enum: EnumDescriptor, number: int) -> str:
    """The name of a value without the enum's own: PLAN_ONCE; the number where it is not known here."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    value = enum.values_by_number.get(number)
    return str(number) if value is None else value.name.removeprefix(prefix)


# The descriptors' types differ between protobuf's implementations: Any.
def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return dict(value)
        return [_single(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _single(value, field)


def _single(value: Any, field: Any) -> Any:
    if isinstance(value, Timestamp):
        return value.ToDatetime(UTC).isoformat(timespec="milliseconds")
    if isinstance(value, Message):
        return record(value)
    return value if field.enum_type is None else enum_name(field.enum_type, value)
