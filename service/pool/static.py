"""Workers that somebody else runs. Knows their addresses only."""

import asyncio
from dataclasses import dataclass

from service.pool import Incarnation


@dataclass(frozen=True, slots=True)
class StaticPool:
    """Workers at given addresses, `HOST:PORT` or `unix:PATH`."""

    addresses: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of addresses."""
        return len(self.addresses)

    @property
    def token(self) -> str:
        """None: whoever runs them decides who may call."""
        return ""

    async def next(self, index: int) -> Incarnation:
        """Return whatever process answers at the address."""
        return Incarnation(self.addresses[index])

    def kill(self, index: int, incarnation: Incarnation) -> None:
        """Leave it as it is."""

    async def watch(self) -> None:
        """Never end: there is nothing to follow."""
        await asyncio.Event().wait()

    def stop(self, grace_s: float) -> None:
        """Leave them as they are."""
