"""The inputs of a program in memory that stays, and what a step must write of it. Knows no model."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from worker.batch import Row
from worker.plan.graph import StepInputs
from worker.plan.program import Extent, live_length
from worker.plan.rows import StepLimits

CPU = torch.device("cpu")
Layout = tuple[tuple[int, int, bool], ...]
"""Slot, number of tokens and whether logits are wanted, in the order of slots."""


class Binding(NamedTuple):
    """One step, written into the buffers.

    Attributes:
        num_tokens: Live tokens.
        num_rows: Slots up to the last one that has tokens.
        num_logits: Tokens that logits are wanted for.
        places: Which of the logits belong to the rows that want them, in the order given.
        num_bytes: What was written of what the program reads: tokens and lengths, and what else differs from
            the last step.
    """

    num_tokens: int
    num_rows: int
    num_logits: int
    places: tuple[int, ...]
    num_bytes: int


class _Seat(NamedTuple):
    """Where a row of the step lies, however far its session has come.

    Attributes:
        session_id: Of the row.
        num_tokens: The row's.
        wants_logits: As the row does.
        slot: Its row in the buffers.
        first: Which of the step's tokens is its first.
    """

    session_id: str
    num_tokens: int
    wants_logits: bool
    slot: int
    first: int


class StepBuffers:
    """Buffers at capacity in which a session keeps its row, its slot, from step to step.

    Tokens and logits lie in the order of slots, so the order of a batch's rows is nobody's concern. A slot
    whose session is not in a step has no tokens: `query_start[slot] == query_start[slot + 1]`. A session
    that has no slot takes the one that went unused longest.

    Tokens, positions and context lengths are written by every step. Of the rest only what differs from the
    last one is: entries of a block table are compared with what the slot holds, and the layout
    (`query_start`, `logits_index`) stays while the same rows have as many tokens. All of this runs on caches
    that the weights have just swept, where what counts is how much code and memory is touched, not how often:
    hence one walk while the same rows come, and numbers that go into memoryviews one by one
    (docs/decisions/0021).

    Args:
        limits: What rows are checked against; sizes of the buffers.
        device: Where the program reads its inputs. Elsewhere than on the CPU the live parts are copied.

    Attributes:
        inputs: What the program reads, at capacity.
    """

    def __init__(self, limits: StepLimits, *, device: torch.device = CPU) -> None:
        capacity = limits.capacity
        tokens, rows = capacity.num_tokens, capacity.num_rows
        host = StepInputs(
            token_ids=torch.zeros(tokens, dtype=torch.int32),
            position=torch.zeros(tokens, dtype=torch.int32),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
            block_table=torch.zeros(rows, capacity.max_blocks, dtype=torch.int32),
            context_len=torch.zeros(rows, dtype=torch.int32),
            query_start=torch.zeros(rows + 1, dtype=torch.int32),
            logits_index=torch.zeros(rows, dtype=torch.int32),
        )
        self._copied = () if device == CPU else host
        self.inputs = host if device == CPU else StepInputs(*(tensor.to(device) for tensor in host))
        self._limits = limits
        self._token_ids = host.token_ids.numpy().data
        self._position = host.position.numpy().data
        self._slot_mapping = host.slot_mapping.numpy().data
        self._context_len = host.context_len.numpy().data
        self._query_start = host.query_start.numpy().data
        self._logits_index = host.logits_index.numpy().data
        self._block_table: npt.NDArray[np.int32] = host.block_table.numpy()
        self._tables: list[tuple[int, ...]] = [()] * rows
        self._slots: dict[str, int] = {}
        self._sessions: list[str | None] = [None] * rows
        self._last_layout = [0] * rows
        self._num_layouts = 0
        self._seats: tuple[_Seat, ...] = ()
        self._layout: Layout = ()
        self._binding = Binding(0, 0, 0, (), 0)
        self._num_bytes = 0

    def slot(self, session_id: str) -> int | None:
        """The session's row in the buffers, if it has one."""
        return self._slots.get(session_id)

    def bind(self, rows: Sequence[Row]) -> Binding:
        """Checks and writes one step. A refused one seats no session and takes no slot from one.

        Whatever ends a bind, an interrupt or a lack of memory too: nothing of it reaches a later step. The
        next one writes what every step writes, and compares the rest with what is there; what it must not
        trust is forgotten before it is written anew, and known again after.

        Args:
            rows: Of one step, their values of the types that `Row` names.

        Raises:
            StepTooLarge: The step is over a limit.
            ValueError: A row's values are wrong.
        """
        self._num_bytes = 0
        if not self._write(rows):  # other rows than those of the last step, or wrong ones
            self._limits.check(rows)
            self._lay_out(rows)
            if not self._write(rows):
                raise AssertionError("rows that passed their check can't be written")
        bound = self._binding
        num_bytes = self._copy(bound) if self._copied else self._num_bytes
        if num_bytes != bound.num_bytes:
            bound = self._binding = bound._replace(num_bytes=num_bytes)
        return bound

    def _write(self, rows: Sequence[Row]) -> bool:
        """Writes a step whose rows lie as those of the last one.

        Returns:
            Whether they do; False, too, where `StepLimits.check` knows what is wrong with them. What was
            written by then is written again by the next step, tables apart: those are compared.
        """
        seats, limits = self._seats, self._limits
        if not seats or len(rows) != len(seats):
            return False
        vocab_size, block_size, most = limits.vocab_size, limits.block_size, limits.max_context_tokens
        token_ids, position, slot_mapping = self._token_ids, self._position, self._slot_mapping
        context_len, tables = self._context_len, self._tables
        written: set[int] = set()
        num_tokens = 0
        for index, row in enumerate(rows):
            session_id, count, wants_logits, slot, at = seats[index]
            # Taken apart at once: each attribute by itself would look its name up in the type.
            row_session_id, row_token_ids, place, table, row_wants_logits, _, _ = row
            end = place + count
            if (
                row_session_id != session_id
                or len(row_token_ids) != count
                or row_wants_logits is not wants_logits
                or not 0 <= place < end <= most
                or end > len(table) * block_size
                or not (table is tables[slot] or table == tables[slot] or self._write_table(table, slot))
            ):
                return False
            for token_id in row_token_ids:
                if not 0 <= token_id < vocab_size:
                    return False
                new_slot = table[place // block_size] * block_size + place % block_size
                written.add(new_slot)
                token_ids[at] = token_id
                position[at] = place
                slot_mapping[at] = new_slot
                at += 1
                place += 1
            context_len[slot] = end
            num_tokens += count
        self._num_bytes += num_tokens * (4 + 4 + 8) + len(rows) * 4
        return len(written) == num_tokens

    def _write_table(self, table: tuple[int, ...], slot: int) -> bool:
        """Writes what differs from the slot's table; False, and nothing written, for one that can't be."""
        held = self._block_table[slot, : len(table)]
        if len(held) < len(table) or min(table) < 0 or max(table) >= self._limits.num_blocks:
            return False
        new: npt.NDArray[np.int32] = np.array(table, np.int32)
        changed = np.flatnonzero(held != new)
        self._tables[slot] = ()
        held[changed] = new[changed]
        self._tables[slot] = tuple(table)
        self._num_bytes += 4 * len(changed)
        return True

    def _lay_out(self, rows: Sequence[Row]) -> None:
        """Seats the rows, and has the layout of that."""
        self._seats = ()
        self._num_layouts += 1
        self._seat([row.session_id for row in rows])
        slots = [self._slots[row.session_id] for row in rows]
        order = sorted(range(len(rows)), key=slots.__getitem__)
        layout = tuple((slots[i], len(rows[i].token_ids), rows[i].wants_logits) for i in order)
        if layout != self._layout:
            self._write_layout(layout)
        first: dict[int, int] = {}
        place_of: dict[int, int] = {}
        num_tokens = 0
        for index in order:
            first[index] = num_tokens
            num_tokens += len(rows[index].token_ids)
            if rows[index].wants_logits:
                place_of[index] = len(place_of)
        places = tuple(place_of[index] for index in sorted(place_of))
        self._binding = Binding(num_tokens, slots[order[-1]] + 1, len(places), places, 0)
        self._seats = tuple(
            _Seat(row.session_id, len(row.token_ids), row.wants_logits, slots[index], first[index])
            for index, row in enumerate(rows)
        )

    def _write_layout(self, layout: Layout) -> None:
        """Writes where rows start, up to the last one that has tokens, and which tokens logits are of."""
        self._layout = ()
        start = num_rows = num_logits = 0
        for slot, num_tokens, wants_logits in layout:
            for empty in range(num_rows, slot + 1):
                self._query_start[empty] = start
            start += num_tokens
            num_rows = slot + 1
            if wants_logits:
                self._logits_index[num_logits] = start - 1
                num_logits += 1
        self._query_start[num_rows] = start
        self._layout = layout
        self._num_bytes += 4 * (num_rows + num_logits)

    def _seat(self, session_ids: Sequence[str]) -> None:
        """Gives every session of the step a slot."""
        new = []
        for session_id in session_ids:
            if (slot := self._slots.get(session_id)) is None:
                new.append(session_id)
            else:
                self._last_layout[slot] = self._num_layouts
        for session_id in new:
            slot = min(range(len(self._last_layout)), key=self._last_layout.__getitem__)
            if (gone := self._sessions[slot]) is not None:
                self._slots.pop(gone, None)
            self._sessions[slot] = session_id
            self._slots[session_id] = slot
            self._last_layout[slot] = self._num_layouts

    def _copy(self, bound: Binding) -> int:
        """Copies what the program reads to the device and returns its size in bytes."""
        live = {
            Extent.TOKENS: bound.num_tokens,
            Extent.ROWS: bound.num_rows,
            Extent.LOGITS: bound.num_logits,
        }
        num_bytes = 0
        for name, target, source in zip(StepInputs._fields, self.inputs, self._copied, strict=True):
            length = live_length(name, live)
            target[:length].copy_(source[:length])
            num_bytes += source[:length].nbytes
        return num_bytes
