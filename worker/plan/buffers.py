"""The inputs of a program in memory that stays, and what a step must write of it. Knows no model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.batch import Row
from worker.plan.graph import StepInputs
from worker.plan.program import Capacity, Extent, live_length
from worker.plan.rows import slots_of

CPU = torch.device("cpu")
Ints = npt.NDArray[np.int32]
Layout = tuple[tuple[int, int, bool], ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """One step, written into the buffers.

    Attributes:
        num_tokens: Live tokens.
        num_rows: Slots up to the last one that has tokens.
        num_logits: Tokens that logits are wanted for.
        places: For each row, in the order given, which of the logits are its own; None: it wants none.
        num_bytes: What was written for the program to read.
    """

    num_tokens: int
    num_rows: int
    num_logits: int
    places: tuple[int | None, ...]
    num_bytes: int


class StepBuffers:
    """Buffers at capacity in which a session keeps its row, its slot, from step to step.

    Tokens and logits lie in the order of slots, so the order of a batch's rows is nobody's concern. A slot
    whose session is not in a step has no tokens: `query_start[slot] == query_start[slot + 1]`. A session
    that has no slot takes the one that went unused longest.

    Only what differs from the last step is written: entries of a block table are compared with what the slot
    holds, and the layout (`query_start`, `logits_index`) stays while the same slots have as many tokens.

    Args:
        capacity: Sizes of the buffers.
        block_size: Tokens per KV block.
        device: Where the program reads its inputs. Elsewhere than on the CPU the live parts are copied.

    Attributes:
        inputs: What the program reads, at capacity.
    """

    def __init__(self, capacity: Capacity, *, block_size: int, device: torch.device = CPU) -> None:
        tokens, rows = capacity.num_tokens, capacity.num_rows
        self._block_size = block_size
        self._token_ids: Ints = np.zeros(tokens, np.int32)
        self._position: Ints = np.zeros(tokens, np.int32)
        self._slot_mapping: npt.NDArray[np.int64] = np.zeros(tokens, np.int64)
        self._block_table: Ints = np.zeros((rows, capacity.max_blocks), np.int32)
        self._context_len: Ints = np.zeros(rows, np.int32)
        self._query_start: Ints = np.zeros(rows + 1, np.int32)
        self._logits_index: Ints = np.zeros(rows, np.int32)
        host = StepInputs(*(torch.from_numpy(getattr(self, f"_{name}")) for name in StepInputs._fields))
        self._copied = () if device == CPU else host
        self.inputs = host if device == CPU else StepInputs(*(tensor.to(device) for tensor in host))
        self._slots: dict[str, int] = {}
        self._sessions: list[str | None] = [None] * rows
        self._last_step = [0] * rows
        self._tables: list[tuple[int, ...]] = [()] * rows
        self._layout: Layout = ()
        self._num_steps = 0

    def slot(self, session_id: str) -> int | None:
        """The session's row in the buffers, if it has one."""
        return self._slots.get(session_id)

    def bind(self, rows: Sequence[Row]) -> Binding:
        """Writes one step.

        Args:
            rows: Within the capacity, no session twice; `StepLimits.check` has seen them.
        """
        self._num_steps += 1
        self._seat(rows)
        slots = [self._slots[row.session_id] for row in rows]
        order = sorted(range(len(rows)), key=slots.__getitem__)
        num_bytes = 0
        start = 0
        for index in order:
            num_bytes += self._write_row(rows[index], slots[index], start)
            start += len(rows[index].token_ids)
        layout = tuple((slots[i], len(rows[i].token_ids), rows[i].wants_logits) for i in order)
        if layout != self._layout:
            num_bytes += self._write_layout(layout)
        wanting = [index for index in order if rows[index].wants_logits]
        place_of = {index: place for place, index in enumerate(wanting)}
        places = tuple(place_of.get(index) for index in range(len(rows)))
        num_rows = slots[order[-1]] + 1
        if self._copied:
            num_bytes = self._copy(start, num_rows, len(wanting))
        return Binding(start, num_rows, len(wanting), places, num_bytes)

    def _seat(self, rows: Sequence[Row]) -> None:
        """Gives every session of the step a slot."""
        new = []
        for row in rows:
            if (slot := self._slots.get(row.session_id)) is None:
                new.append(row.session_id)
            else:
                self._last_step[slot] = self._num_steps
        for session_id in new:
            slot = min(range(len(self._last_step)), key=self._last_step.__getitem__)
            if (gone := self._sessions[slot]) is not None:
                del self._slots[gone]
            self._slots[session_id], self._sessions[slot] = slot, session_id
            self._last_step[slot] = self._num_steps

    def _write_row(self, row: Row, slot: int, start: int) -> int:
        end = start + len(row.token_ids)
        if end - start == 1:
            self._token_ids[start] = row.token_ids[0]
            self._position[start] = row.position
        else:
            self._token_ids[start:end] = row.token_ids
            self._position[start:end] = range(row.position, row.context_len)
        self._slot_mapping[start:end] = slots_of(row, self._block_size)
        self._context_len[slot] = row.context_len
        num_bytes = (end - start) * (4 + 4 + 8) + 4
        if row.block_table != self._tables[slot]:
            num_bytes += self._write_table(row.block_table, slot)
        return num_bytes

    def _write_table(self, table: tuple[int, ...], slot: int) -> int:
        held = self._block_table[slot, : len(table)]
        new: Ints = np.array(table, np.int32)
        changed = np.flatnonzero(held != new)
        held[changed] = new[changed]
        self._tables[slot] = table
        return 4 * len(changed)

    def _write_layout(self, layout: Layout) -> int:
        """Writes where rows start, up to the last one that has tokens, and which tokens logits are of."""
        num_rows = layout[-1][0] + 1
        counts = np.zeros(num_rows, np.int32)
        counts[[slot for slot, _, _ in layout]] = [count for _, count, _ in layout]
        self._query_start[1 : num_rows + 1] = counts.cumsum()
        logits_index = [
            int(self._query_start[slot + 1]) - 1 for slot, _, wants_logits in layout if wants_logits
        ]
        self._logits_index[: len(logits_index)] = logits_index
        self._layout = layout
        return 4 * (num_rows + len(logits_index))

    def _copy(self, num_tokens: int, num_rows: int, num_logits: int) -> int:
        """Copies what the program reads to the device and returns its size in bytes."""
        live = {Extent.TOKENS: num_tokens, Extent.ROWS: num_rows, Extent.LOGITS: num_logits}
        num_bytes = 0
        for name, target, source in zip(StepInputs._fields, self.inputs, self._copied, strict=True):
            length = live_length(name, live)
            target[:length].copy_(source[:length])
            num_bytes += source[:length].nbytes
        return num_bytes
