"""What all plans of a runner share on a device, and how a step's inputs get there. Knows no launch, no model.

One copy carries all of a step that is new, a second one what its draws change of logits, if they do.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.batch import UNKNOWN_TOKEN, Row
from worker.kernels.draw_words import DRAW_WORDS, ENTRY_WORDS
from worker.plan.buckets import Bucket
from worker.plan.device import Device, Mark
from worker.plan.draw_params import MAX_ENTRIES, write
from worker.plan.graph import StepInputs
from worker.plan.rows import StepLimits
from worker.plan.slots import Blocks, Slots
from worker.plan.staging_layout import StagingLayout, unknown_token
from worker.sampling import Draw

_SLOTS_PER_ROW = 2
"""A session must keep its slot from the step that draws its token to the next one, which may first bring as
many others as a step has rows."""
_WORD_BYTES = 4


class Staged(NamedTuple):
    """One step, on its way.

    Attributes:
        num_logits: Tokens that logits are wanted of.
        num_bytes: What is copied.
    """

    num_logits: int
    num_bytes: int


class _Buffer:
    """Host memory of one step in flight."""

    def __init__(self, device: Device, num_words: int) -> None:
        self._device = device
        self.words = device.host(num_words, dtype=torch.int32)
        self.entries = device.host(MAX_ENTRIES, ENTRY_WORDS, dtype=torch.int32)
        self.copied: Mark | None = None

    def take(self) -> None:
        """Waits until nothing reads the memory any more."""
        if self.copied is not None:
            self.copied.wait()
            self.copied = None

    def grow(self, num_entries: int) -> None:
        """Makes room for entries; those that are there stay."""
        room = len(self.entries)
        if num_entries > room:
            grown = self._device.host(1 << (num_entries - 1).bit_length(), ENTRY_WORDS, dtype=torch.int32)
            grown[:room] = self.entries
            self.entries = grown


class Staging:
    """The inputs of steps on a device, and the two host buffers that they come from.

    A buffer is written again only when the copies from it are done. Launches run in order, so what is on the
    device is there once: a step's copy waits for the launches of the one before.

    Args:
        limits: Of steps.
        device: Where launches run.

    Attributes:
        slots: Which session has which row of `block_table` and entry of `fed`.
        words: [words] int32, what `bind_step` unpacks.
        entries: [entries, ENTRY_WORDS] int32, what draws change of logits.
        block_table: [slots, max_blocks] int32.
        fed: [slots] int32, the token that was drawn last for a slot.
        inputs: At capacity, written by `bind_step`.
        ids: [rows] int32, the tokens that were drawn last.
        logprobs: [rows] float32, theirs, where they were asked for.
    """

    def __init__(self, limits: StepLimits, device: Device) -> None:
        capacity = limits.capacity
        tokens, rows = capacity.num_tokens, capacity.num_rows
        self._limits = limits
        self._device = device
        # A few sessions that come with a full table, and for every other row one block more.
        self._max_updates = 4 * capacity.max_blocks + rows
        self._layouts: dict[Bucket, StagingLayout] = {}
        self.slots = Slots(_SLOTS_PER_ROW * rows, capacity.max_blocks)
        num_words = self.layout(Bucket(tokens, rows)).num_words
        self._buffers = tuple(_Buffer(device, num_words) for _ in range(2))
        self._num_staged = 0

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device.torch_device)

        with device.in_order():
            self.words = zeros(num_words)
            self.entries = zeros(rows * MAX_ENTRIES, ENTRY_WORDS)
            self.block_table = zeros(*self.slots.tables.shape)
            self.fed = zeros(len(self.slots.tables))
            self.ids = zeros(rows)
            self.logprobs = zeros(rows, dtype=torch.float32)
            self.inputs = StepInputs(
                token_ids=zeros(tokens),
                position=zeros(tokens),
                slot_mapping=zeros(tokens, dtype=torch.int64),
                block_table=zeros(rows, capacity.max_blocks),
                context_len=zeros(rows),
                query_start=zeros(rows + 1),
                logits_index=zeros(rows),
            )

    def layout(self, bucket: Bucket) -> StagingLayout:
        """Where a step of a bucket lies in the words."""
        if bucket not in self._layouts:
            rows = bucket.num_rows
            self._layouts[bucket] = StagingLayout(bucket.num_tokens, rows, rows, self._max_updates)
        return self._layouts[bucket]

    def inputs_of(self, bucket: Bucket) -> StepInputs:
        """The inputs cut to a bucket's sizes."""
        tokens, rows = bucket
        whole = self.inputs
        return StepInputs(
            token_ids=whole.token_ids[:tokens],
            position=whole.position[:tokens],
            slot_mapping=whole.slot_mapping[:tokens],
            block_table=whole.block_table[:rows],
            context_len=whole.context_len[:rows],
            query_start=whole.query_start[: rows + 1],
            logits_index=whole.logits_index[:rows],
        )

    def check(self, rows: Sequence[Row]) -> None:
        """Checks a step; nothing changes.

        Raises:
            StepTooLarge: The step is over a limit.
            ValueError: A row's values are wrong, or its last token is unknown and the device did not draw it.
        """
        self._limits.check(rows, is_fed=self.slots.is_fed, checked_table=self.slots.table)

    def stage(self, rows: Sequence[Row], draws: Sequence[Draw | None], bucket: Bucket) -> Staged:
        """Asks the device to copy a step, inside `in_order`. Whatever raises here, later steps are right.

        Args:
            rows: Checked; none: a step of padding alone.
            draws: One for each row that wants logits: how its token is drawn on the device, None: not there.
            bucket: That the step fits.
        """
        slots = self.slots.seat([row.session_id for row in rows])
        was_known, self.slots.is_known = self.slots.is_known, False
        buffer = self._buffers[self._num_staged % 2]
        self._num_staged += 1
        try:
            buffer.take()
            try:
                staged = self._stage(
                    rows, slots, draws, self.layout(bucket), buffer, table_is_known=was_known
                )
            finally:
                buffer.copied = self._device.mark()
        except BaseException:
            self.slots.forget(slots)
            raise
        wants = iter(draws)
        for row, slot in zip(rows, slots, strict=True):
            self.slots.feed(slot, is_fed=row.wants_logits and next(wants) is not None)
        self.slots.is_known = True
        return staged

    def forget(self, rows: Sequence[Row]) -> None:
        """What the step of `rows`, staged last, leaves on the device is not to be relied on."""
        slots = (self.slots.slot(row.session_id) for row in rows)
        self.slots.forget([slot for slot in slots if slot is not None])

    def _stage(
        self,
        rows: Sequence[Row],
        slots: Sequence[int],
        draws: Sequence[Draw | None],
        layout: StagingLayout,
        buffer: _Buffer,
        *,
        table_is_known: bool,
    ) -> Staged:
        updates = [self.slots.update(slot, row.block_table) for row, slot in zip(rows, slots, strict=True)]
        num_updates = sum(len(blocks) for _, blocks in updates)
        num_bytes = 0
        if not table_is_known or num_updates > layout.max_updates:
            # A copy, since the next step writes the slots' own while this one may wait.
            self._device.copy(self.block_table, torch.from_numpy(self.slots.tables.copy()))
            num_bytes += self.block_table.nbytes
            updates, num_updates = [(0, blocks[:0]) for _, blocks in updates], 0
        words: Blocks = buffer.words.numpy()
        self._write_tokens(rows, slots, layout, words)
        _write_updates(updates, layout, words)
        num_entries = _write_draws(rows, slots, draws, layout, buffer)
        num_words = layout.updates + num_updates
        self._device.copy(self.words[:num_words], buffer.words[:num_words])
        num_bytes += _WORD_BYTES * num_words
        if num_entries:
            self._device.copy(self.entries[:num_entries], buffer.entries[:num_entries])
            num_bytes += _WORD_BYTES * ENTRY_WORDS * num_entries
        return Staged(len(draws), num_bytes)

    def _write_tokens(
        self, rows: Sequence[Row], slots: Sequence[int], layout: StagingLayout, words: Blocks
    ) -> None:
        block_size = self._limits.block_size
        token_ids: list[int] = []
        position: list[int] = []
        slot_mapping: list[int] = []
        ends: list[int] = []
        for row, slot in zip(rows, slots, strict=True):
            token_ids += row.token_ids
            if row.token_ids[-1] == UNKNOWN_TOKEN:
                token_ids[-1] = unknown_token(slot)
            places = range(row.position, row.context_len)
            position += places
            table = row.block_table
            slot_mapping += [table[at // block_size] * block_size + at % block_size for at in places]
            ends.append(len(token_ids))
        logits_index = [end - 1 for row, end in zip(rows, ends, strict=True) if row.wants_logits]
        words[layout.header : layout.header + 4] = (len(token_ids), len(rows), len(logits_index), 0)
        for offset, numbers in (
            (layout.token_ids, token_ids),
            (layout.position, position),
            (layout.slot_mapping, slot_mapping),
            (layout.query_start, [0, *ends]),
            (layout.context_len, [row.context_len for row in rows]),
            (layout.row_slot, slots),
            (layout.logits_index, logits_index),
        ):
            words[offset : offset + len(numbers)] = numbers


def _write_updates(updates: Sequence[tuple[int, Blocks]], layout: StagingLayout, words: Blocks) -> None:
    starts = list(accumulate((len(blocks) for _, blocks in updates), initial=0))
    words[layout.update_first : layout.update_first + len(updates)] = [first for first, _ in updates]
    words[layout.update_start : layout.update_start + len(starts)] = starts
    if starts[-1]:
        words[layout.updates : layout.updates + starts[-1]] = np.concatenate([each for _, each in updates])


def _write_draws(
    rows: Sequence[Row],
    slots: Sequence[int],
    draws: Sequence[Draw | None],
    layout: StagingLayout,
    buffer: _Buffer,
) -> int:
    """Writes the parameters of draws; returns the number of all their entries."""
    end = layout.draws + len(draws) * DRAW_WORDS
    table: Blocks = buffer.words.numpy()[layout.draws : end].reshape(-1, DRAW_WORDS)
    table[:] = 0
    wanting = [slot for row, slot in zip(rows, slots, strict=True) if row.wants_logits]
    num_entries = 0
    for words, slot, draw in zip(table, wanting, draws, strict=True):
        if draw is not None:
            if _may_have_entries(draw):
                buffer.grow(num_entries + MAX_ENTRIES)
            room: Blocks = buffer.entries.numpy()[num_entries:]
            num_entries += write(draw, words, room, slot=slot, first_entry=num_entries)
    return num_entries


def _may_have_entries(draw: Draw) -> bool:
    sampling = draw.sampling
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return bool(draw.banned or sampling.logit_bias) or penalties != (1.0, 0.0, 0.0)
