"""What a field of the wire can hold, told by the option's name. Knows no message and no option.

The server alone decides which values have a meaning; here is refused what could not be sent.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from operator import index
from typing import SupportsFloat, SupportsIndex
from uuid import UUID

from google.protobuf.duration_pb2 import Duration

# gRPC counts nanoseconds in 64 bits; a longer deadline would wrap and have passed already.
MAX_TIMEOUT_S = 10**9
# A google.protobuf.Duration holds 10,000 years either way.
MAX_DURATION_S = 315_576_000_000


def options(method: str, unknown: Collection[str], known: Collection[str]) -> None:
    """Raise TypeError for names that are no options of the method, with the nearest that is one."""
    for name in unknown:
        nearest = get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise TypeError(f"{method}() got an unexpected option {name!r}{hint}")


def text(name: str, value: object) -> str:
    """Return `value` if it is a str that UTF-8 can spell. Raises TypeError or ValueError naming `name`."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: character {error.start} is a lone surrogate, not text") from error
    return value


def whole(name: str, value: object, bits: int) -> int:
    """Return `value` if it is a whole number from 0 to 2**bits-1. Raises TypeError or ValueError."""
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {_kind(value)}")
    number = index(value)
    if not 0 <= number < 1 << bits:
        raise ValueError(f"{name}: {_short(number)} is not from 0 to 2**{bits}-1")
    return number


def optional_whole(name: str, value: object, bits: int) -> int | None:
    """Return None for None, else as `whole`."""
    return None if value is None else whole(name, value, bits)


def wholes(name: str, value: object, bits: int) -> list[int] | None:
    """Return a sequence of whole numbers as a list, None for None. Raises TypeError or ValueError."""
    if value is None:
        return None
    return [whole(f"{name}[{at}]", item, bits) for at, item in enumerate(_items(name, value, "int"))]


def optional_signed(name: str, value: object, bits: int) -> int | None:
    """Return None for None, else a whole number from -2**(bits-1) to 2**(bits-1)-1; raises as `whole`."""
    if value is None:
        return None
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {_kind(value)}")
    number = index(value)
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise ValueError(f"{name}: {_short(number)} is not from -2**{bits - 1} to 2**{bits - 1}-1")
    return number


def real(name: str, value: object) -> float:
    """Return `value` as a float if it is a number. Raises TypeError or ValueError naming `name`."""
    if not isinstance(value, SupportsFloat | SupportsIndex) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {_kind(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name}: the number is too large") from error


def optional_real(name: str, value: object) -> float | None:
    """Return None for None, else as `real`."""
    return None if value is None else real(name, value)


def optional_duration(name: str, value: object) -> Duration | None:
    """Return seconds as a Duration, None for None. Raises TypeError or ValueError naming `name`."""
    if value is None:
        return None
    seconds = real(name, value)
    if not abs(seconds) <= MAX_DURATION_S:  # nan neither
        raise ValueError(f"{name}: {seconds:g} is not within {MAX_DURATION_S} seconds")
    duration = Duration()
    # A time over 0 stays over 0, however short.
    duration.FromNanoseconds(round(seconds * 1e9) or math.ceil(seconds * 1e9))
    return duration


def optional_request_id(value: object) -> str | None:
    """Return a UUID as text, a str as it is, None for None. Raises TypeError or ValueError."""
    if value is None:
        return None
    if isinstance(value, UUID):
        return str(value)
    if not isinstance(value, str):
        raise TypeError(f"request_id: expected a str or a UUID, got {_kind(value)}")
    return text("request_id", value)


def flag(name: str, value: object) -> bool:
    """Return `value` if it is a bool. Raises TypeError naming `name`."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {_kind(value)}")
    return value


def labels(name: str, value: object) -> dict[str, str] | None:
    """Return a mapping of str to str as a dict, None for None. Raises TypeError or ValueError."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a mapping of str to str, got {_kind(value)}")
    return {text(f"a key of {name}", key): text(f"{name}[{key!r}]", item) for key, item in value.items()}


def texts(name: str, value: object) -> list[str] | None:
    """Return a sequence of str as a list, None for None. Raises TypeError or ValueError."""
    if value is None:
        return None
    return [text(f"{name}[{at}]", item) for at, item in enumerate(_items(name, value, "str"))]


def biases(name: str, value: object) -> dict[int, float] | None:
    """Return a mapping of 32-bit ids to numbers as a dict, None for None. Raises TypeError or ValueError."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a mapping of int to float, got {_kind(value)}")
    return {
        (token_id := whole(f"a key of {name}", key, 32)): real(f"{name}[{token_id}]", item)
        for key, item in value.items()
    }


def timeout_s(value: object) -> float | None:
    """Return a deadline in seconds, None for None. Raises TypeError or ValueError."""
    seconds = optional_real("timeout_s", value)
    if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s: {seconds:g} is not over 0 and at most {MAX_TIMEOUT_S} seconds")
    return seconds


def _items(name: str, value: object, kind: str) -> Iterable[object]:
    # Text and bytes are sequences too, of what nobody means; sets have no order, generators no second time.
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        raise TypeError(f"{name}: expected a sequence of {kind}, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return type(value).__name__


def _short(number: int) -> str:
    # Python refuses to print integers of thousands of digits.
    return str(number) if abs(number) < 10**20 else f"{'-' * (number < 0)}2**{abs(number).bit_length() - 1}…"
