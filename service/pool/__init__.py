"""Where workers come from: `local` spawns them, `static` is given them, `link` talks to one.

Knows processes, addresses and the worker protocol; does not know sessions or who calls.
"""

from typing import Protocol


class Pool(Protocol):
    """A set of workers, each at an address for as long as the pool lives."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """GRPC target of each worker."""
        ...

    def exit_code(self, address: str) -> int | None:
        """Exit code of the worker's process; None while it runs, or where it is not ours to know."""
        ...

    def stop(self, grace_s: float) -> None:
        """End the workers that the pool started, killing those that outlast `grace_s`. Idempotent."""
        ...
