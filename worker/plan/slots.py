"""Which session has which row of the device's block table, and what that row holds. Knows no device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int32]
_NONE: Blocks = np.zeros(0, np.int32)


class Slots:
    """Sessions keep a slot from step to step, so that only block ids that are new have to travel.

    A session without one takes the slot that went unused longest, of several the lowest.

    Args:
        num_slots: Slots.
        max_blocks: Blocks of a table.

    Attributes:
        tables: [num_slots, max_blocks] int32, what the device's block table holds once all that was told of
            it has been done.
        is_known: Whether it does; after `forget` the device's table has to be written whole.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.tables: Blocks = np.zeros((num_slots, max_blocks), np.int32)
        self.is_known = True
        self._slots: dict[str, int] = {}
        self._sessions: list[str | None] = [None] * num_slots
        self._last_step = [0] * num_slots
        self._num_steps = 0
        self._is_fed = [False] * num_slots
        self._held: list[tuple[int, ...]] = [()] * num_slots

    def slot(self, session_id: str) -> int | None:
        """The session's slot, if it has one."""
        return self._slots.get(session_id)

    def table(self, session_id: str) -> tuple[int, ...]:
        """The table that the session's slot was given last; empty without a slot."""
        slot = self._slots.get(session_id)
        return () if slot is None else self._held[slot]

    def is_fed(self, session_id: str) -> bool:
        """Whether the device drew the last token of the session's log, and knows it."""
        slot = self._slots.get(session_id)
        return slot is not None and self._is_fed[slot]

    def feed(self, slot: int, *, is_fed: bool) -> None:
        """Notes whether the step that was launched last leaves the slot's next token on the device."""
        self._is_fed[slot] = is_fed

    def seat(self, session_ids: Sequence[str]) -> list[int]:
        """Gives every session of a step a slot, in the order given.

        Args:
            session_ids: All different, at most as many as there are slots.
        """
        self._num_steps += 1
        new = []
        for session_id in session_ids:
            if (slot := self._slots.get(session_id)) is None:
                new.append(session_id)
            else:
                self._last_step[slot] = self._num_steps
        for session_id in new:
            slot = min(range(len(self._last_step)), key=self._last_step.__getitem__)
            if (gone := self._sessions[slot]) is not None:
                self._slots.pop(gone, None)
            self._is_fed[slot] = False
            self._held[slot] = ()
            self._sessions[slot] = session_id
            self._slots[session_id] = slot
            self._last_step[slot] = self._num_steps
        return [self._slots[session_id] for session_id in session_ids]

    def update(self, slot: int, table: Sequence[int]) -> tuple[int, Blocks]:
        """Makes a slot's row that of `table`, as far as the table reaches.

        Returns:
            The first logical block that changes, and the block ids from there to the last that does; none
            where nothing changes.
        """
        was = self._held[slot]
        # Most often it is the very object: thousands of blocks are not to be compared each step.
        if table is was or table == was:
            return 0, _NONE
        self._held[slot] = ()
        held = self.tables[slot, : len(table)]
        new: Blocks = np.array(table, np.int32)
        changed = np.flatnonzero(held != new)
        first, end = (int(changed[0]), int(changed[-1]) + 1) if len(changed) else (0, 0)
        held[first:end] = new[first:end]
        self._held[slot] = tuple(table)
        return first, new[first:end]

    def forget(self, slots: Sequence[int]) -> None:
        """Nothing is sure of the device's table any more, nor of the tokens that it has for some slots."""
        self.is_known = False
        for slot in slots:
            self._is_fed[slot] = False
