"""Builds the wire's input from what a caller gives. Knows no request, channel or call.

What cannot be sent raises TypeError or ValueError that names the item.
"""

from collections.abc import Sequence

from pagecast import _checks
from pagecast.v1 import session_pb2
from pagecast.values import Message, TurnInput

_ROLES = {
    "system": session_pb2.ROLE_SYSTEM,
    "user": session_pb2.ROLE_USER,
    "assistant": session_pb2.ROLE_ASSISTANT,
}
_CONTENT = "a str, a sequence of int, a sequence of Message"


def turn_input(
    content: TurnInput, *, raw: bool, name: str = "input", may_be_none: bool = True
) -> session_pb2.Input | None:
    """The wire's input; None stays None.

    Args:
        content: What to send.
        raw: Whether a str is sent as it is, not as a user message.
        name: What the caller calls `content`.
        may_be_none: Whether None means something to the call.

    Raises:
        TypeError: `content` is none of `TurnInput`, or `raw` without a str.
        ValueError: An empty sequence, whose kind cannot be told; an unknown role; an id that is not
            from 0 to 2**32-1; text that UTF-8 cannot spell.
    """
    expected = f"{name}: expected {_CONTENT}{', or None' if may_be_none else ''}"
    if _checks.flag("raw", raw) and not isinstance(content, str):
        raise TypeError(f"raw: only a str can be raw, not {type(content).__name__}")
    if content is None and may_be_none:
        return None
    if isinstance(content, str):
        if raw:
            return session_pb2.Input(text=_checks.text(name, content))
        content = (Message("user", content),)
    # Bytes are sequences of int, and never meant as token ids; sets and generators have no order or length.
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray | memoryview):
        raise TypeError(f"{expected}, got {type(content).__name__}")
    if not content:
        raise ValueError(f"{name}: an empty sequence is neither token ids nor messages")
    if isinstance(content[0], Message):
        messages = [_message(f"{name}[{at}]", item, expected) for at, item in enumerate(content)]
        return session_pb2.Input(messages=session_pb2.Messages(messages=messages))
    ids = [_token_id(name, at, item, expected) for at, item in enumerate(content)]
    return session_pb2.Input(token_ids=session_pb2.TokenIds(ids=ids))


def _token_id(name: str, position: int, item: object, expected: str) -> int:
    if type(item) is int and 0 <= item < 1 << 32:  # as almost all are, and there may be many
        return item
    try:
        return _checks.whole(f"{name}[{position}]", item, 32)
    except TypeError as error:
        raise TypeError(f"{expected}; item {position} is {type(item).__name__}") from error


def _message(name: str, message: object, expected: str) -> session_pb2.Message:
    if not isinstance(message, Message):
        raise TypeError(f"{expected}; {name} is {type(message).__name__}")
    role = _checks.text(f"{name}.role", message.role)
    if role not in _ROLES:
        raise ValueError(f"{name}.role: {role!r} is none of {', '.join(_ROLES)}")
    return session_pb2.Message(role=_ROLES[role], content=_checks.text(f"{name}.content", message.content))
