"""What a field of the wire can hold, told by the option's name. Knows no message and no option.

The server alone decides which values have a meaning; here is refused what could not be sent.
"""

from collections.abc import Mapping
from operator import index
from typing import SupportsFloat, SupportsIndex

# gRPC counts nanoseconds in 64 bits; a longer deadline would wrap and have passed already.
MAX_TIMEOUT_S = 10**9


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


def timeout_s(value: object) -> float | None:
    """Return a deadline in seconds, None for None. Raises TypeError or ValueError."""
    seconds = optional_real("timeout_s", value)
    if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s: {seconds:g} is not over 0 and at most {MAX_TIMEOUT_S} seconds")
    return seconds


def _kind(value: object) -> str:
    return type(value).__name__


def _short(number: int) -> str:
    # Python refuses to print integers of thousands of digits.
    return str(number) if abs(number) < 10**20 else f"{'-' * (number < 0)}2**{abs(number).bit_length() - 1}…"
