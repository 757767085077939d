"""Where workers come from: `local` has them started, `static` is given them; `slot` keeps one connected.

    supervisor   the process that starts workers and starts them anew
    link         talks to one worker process; mailbox holds what a stream has not taken
    prober       finds out that a worker hangs

Knows processes, addresses and the worker protocol; does not know sessions or who calls.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Incarnation:
    """One process in a worker's place.

    Attributes:
        address: Its gRPC target.
        pid: None where it is not ours to know.
        exit_code: How it ended (negative: the signal that ended it); None while it runs, or where that
            is not ours to know.
        error: Why it could not be started at all; empty where it could.
    """

    address: str
    pid: int | None = None
    exit_code: int | None = None
    error: str = ""


class Pool(Protocol):
    """A fixed number of places for workers; the processes in them come and go."""

    @property
    def size(self) -> int:
        """Number of places."""
        ...

    @property
    def token(self) -> str:
        """What calls to the workers carry; empty where they ask for none."""
        ...

    async def next(self, index: int) -> Incarnation:
        """Wait for the next process in a place, and return it; each comes once."""
        ...

    def kill(self, index: int, incarnation: Incarnation) -> None:
        """End a process that does not answer, where it is ours; the place gets another."""
        ...

    async def watch(self) -> None:
        """Follow the processes; ends only when nobody looks after them any more."""
        ...

    def stop(self, grace_s: float) -> None:
        """End the workers that the pool started, killing those that outlast `grace_s`. Idempotent."""
        ...
