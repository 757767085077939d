"""Workers that somebody else runs. Knows their addresses only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StaticPool:
    """Workers at given addresses, `HOST:PORT` or `unix:PATH`."""

    addresses: tuple[str, ...]

    def exit_code(self, address: str) -> int | None:
        """None: their processes are not ours to know."""
        del address
        return None

    def stop(self, grace_s: float) -> None:
        """Leave them as they are."""
        del grace_s
