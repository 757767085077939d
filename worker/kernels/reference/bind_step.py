"""A step's inputs out of the buffer in which they travelled, in plain torch."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from worker.kernels.draw_words import DRAW_WORDS


class Layout(Protocol):
    """Offsets, in words, of the sections of a staging buffer, as `worker.plan.staging_layout` has them."""

    @property
    def num_words(self) -> int:
        """Of the buffer."""

    @property
    def token_ids(self) -> int:
        """[T]."""

    @property
    def position(self) -> int:
        """[T]."""

    @property
    def slot_mapping(self) -> int:
        """[T]."""

    @property
    def query_start(self) -> int:
        """[R + 1]."""

    @property
    def context_len(self) -> int:
        """[R]."""

    @property
    def row_slot(self) -> int:
        """[R]."""

    @property
    def update_first(self) -> int:
        """[R]."""

    @property
    def update_start(self) -> int:
        """[R + 1]."""

    @property
    def logits_index(self) -> int:
        """[L]."""

    @property
    def draws(self) -> int:
        """[L, DRAW_WORDS]."""

    @property
    def updates(self) -> int:
        """Block ids."""


def bind_step(
    staging: Tensor,
    layout: Layout,
    inputs: Sequence[Tensor],
    block_table: Tensor,
    fed: Tensor,
    *,
    num_tokens: int,
    num_rows: int,
    num_logits: int,
    block_size: int,
) -> None:
    """Unpacks and pads a step.

    Live entries are copied, with an id below 0 replaced by `fed[-1 - id]` (0 where that is below 0). Beyond
    them tokens are id 0 at position 0 without a slot (-1), rows have no tokens and no context, logits are
    of token 0, and draws are none: their words in the staging buffer become 0. Row r's new block ids go
    into its slot's row of the device's block table, and what r's context covers of that goes into `inputs`;
    columns beyond it are left alone.

    Args:
        staging: [layout.num_words] int32; of its draws the padding is written.
        layout: Where its sections lie, with room for the numbers below.
        inputs: The fields of `StepInputs` in order, of at least those numbers; written.
        block_table: [slots, at least max_blocks] int32, written.
        fed: [slots] int32, ids that were drawn on the device.
        num_tokens: T to pad to.
        num_rows: R to pad to.
        num_logits: L to pad to.
        block_size: Tokens per block.
    """
    token_ids, position, slot_mapping, tables, context_len, query_start, logits_index = inputs
    live_tokens, live_rows, live_logits = (int(number) for number in staging[:3])

    def section(start: int, length: int) -> Tensor:
        return staging[start : start + length]

    for target, start, live, total, padding in (
        (token_ids, layout.token_ids, live_tokens, num_tokens, 0),
        (position, layout.position, live_tokens, num_tokens, 0),
        (slot_mapping, layout.slot_mapping, live_tokens, num_tokens, -1),
        (query_start, layout.query_start, live_rows, num_rows + 1, live_tokens),
        (context_len, layout.context_len, live_rows, num_rows, 0),
        (logits_index, layout.logits_index, live_logits, num_logits, 0),
    ):
        target[:live] = section(start, live)
        target[live:total] = padding
    unknown = token_ids[:live_tokens] < 0
    known = fed[(-1 - token_ids[:live_tokens][unknown]).long()]
    token_ids[:live_tokens][unknown] = known.clamp_min(0)
    section(layout.draws + live_logits * DRAW_WORDS, (num_logits - live_logits) * DRAW_WORDS).zero_()

    slots = section(layout.row_slot, live_rows).tolist()
    firsts = section(layout.update_first, live_rows).tolist()
    starts = section(layout.update_start, live_rows + 1).tolist()
    for row, (slot, first) in enumerate(zip(slots, firsts, strict=True)):
        ids = section(layout.updates + starts[row], starts[row + 1] - starts[row])
        block_table[slot, first : first + len(ids)] = ids
        num_blocks = -(-int(context_len[row]) // block_size)
        tables[row, :num_blocks] = block_table[slot, :num_blocks]
