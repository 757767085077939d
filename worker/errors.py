"""Errors that rooms of the worker raise for their callers. A leaf: imports nothing of ours."""

from collections.abc import Mapping
from types import MappingProxyType

_NOTHING: Mapping[str, str] = MappingProxyType({})


class Refused(Exception):
    """A command that changed nothing, told in the words of the public API.

    Attributes:
        reason: UPPER_SNAKE reason of the public API, e.g. SESSION_BUSY.
        message: One sentence for the caller; holds no path, prompt or exception text.
        field: Path of the request field at fault, or empty.
        metadata: Numbers that belong to it.
    """

    def __init__(
        self, reason: str, message: str, *, field: str = "", metadata: Mapping[str, str] = _NOTHING
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.field = field
        self.metadata = metadata


class OutOfBlocks(Exception):
    """The KV pool has fewer free blocks than a call asked for; nothing was taken."""

    def __init__(self, *, wanted: int, free: int) -> None:
        super().__init__(f"wanted {wanted} KV blocks, {free} are free")
        self.wanted = wanted
        self.free = free
