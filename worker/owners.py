"""Whose sessions are whose, and whose owner is gone.

An owner is a gateway's link to this worker. It is there while it reads reports; one that has not for a while
has given its sessions up, or was killed, and nobody else knows of them. Knows ids; does not know calls or
turns. Used on one asyncio thread.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from worker.errors import Refused

# Over what a link takes to come back after its stream broke, or to give its sessions up (3 s).
GONE_AFTER_S = 10.0
# Owners that are still known to be gone.
_MAX_GONE = 1000


class OwnerGone(Exception):
    """An owner came back too late: its sessions are closed."""


@dataclass(slots=True)
class _Owner:
    """One owner.

    Attributes:
        session_ids: Its open sessions.
        num_readers: Streams of reports that it has open.
        timer: Ends it; None while it reads, or has nothing to end.
    """

    session_ids: set[str] = field(default_factory=set)
    num_readers: int = 0
    timer: asyncio.TimerHandle | None = None


class Owners:
    """The owners of this worker's sessions; the empty id is nobody, whose sessions stay.

    Args:
        close: Closes a session and ends its turn, given its id. May raise `Refused`.
        on_gone: Told the number of sessions that were closed with their owner, where there were some.
    """

    def __init__(self, close: Callable[[str], Awaitable[object]], on_gone: Callable[[int], None]) -> None:
        self._close = close
        self._on_gone = on_gone
        self._owners: dict[str, _Owner] = {}
        self._owner_of: dict[str, str] = {}
        self._gone: deque[str] = deque(maxlen=_MAX_GONE)
        self._ending: set[asyncio.Task[None]] = set()

    def opened(self, owner_id: str, session_id: str) -> None:
        """Note who opened a session."""
        if owner_id:
            self._owners.setdefault(owner_id, _Owner()).session_ids.add(session_id)
            self._owner_of[session_id] = owner_id
            self._look_at(owner_id)

    def closed(self, session_id: str) -> None:
        """Forget a session; unknown ids are fine."""
        owner_id = self._owner_of.pop(session_id, "")
        if owner_id in self._owners:
            self._owners[owner_id].session_ids.discard(session_id)
            self._look_at(owner_id)

    @contextmanager
    def reading(self, owner_id: str) -> Iterator[None]:
        """Count an owner as there while the block runs. Raises OwnerGone, which is for good."""
        if owner_id in self._gone:
            raise OwnerGone("the sessions of this owner are closed: it read no reports for too long")
        if not owner_id:
            yield
            return
        self._owners.setdefault(owner_id, _Owner()).num_readers += 1
        self._look_at(owner_id)
        try:
            yield
        finally:
            self._owners[owner_id].num_readers -= 1
            self._look_at(owner_id)

    def _look_at(self, owner_id: str) -> None:
        """Start or stop the timer of an owner, or forget one that has nothing."""
        owner = self._owners[owner_id]
        is_left = owner.num_readers == 0 and bool(owner.session_ids)
        if is_left and owner.timer is None:
            owner.timer = asyncio.get_running_loop().call_later(GONE_AFTER_S, self._end, owner_id)
        elif not is_left and owner.timer is not None:
            owner.timer.cancel()
            owner.timer = None
        if owner.num_readers == 0 and not owner.session_ids:
            del self._owners[owner_id]

    def _end(self, owner_id: str) -> None:
        self._gone.append(owner_id)
        session_ids = self._owners.pop(owner_id).session_ids
        for session_id in session_ids:
            del self._owner_of[session_id]
        task = asyncio.create_task(self._close_all(session_ids))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _close_all(self, session_ids: set[str]) -> None:
        answers = await asyncio.gather(*map(self._close, session_ids), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, Refused):
                raise answer
        # One that is refused was closed by somebody else meanwhile.
        num_closed = sum(not isinstance(answer, Refused) for answer in answers)
        if num_closed:
            self._on_gone(num_closed)
