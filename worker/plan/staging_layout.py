"""Where a step's inputs lie in the one buffer that travels to a device. Knows no tensors, copies nothing."""

from dataclasses import dataclass, field

from worker.kernels.draw_words import DRAW_WORDS

HEADER_WORDS = 4
"""Words of the header: live tokens, live rows, live draws, 0."""
_ALIGNMENT = 4  # words: sections start at multiples of 16 bytes


def unknown_token(slot: int) -> int:
    """The word that stands for the id which the device drew last for `slot`: `fed[slot]` once it is bound."""
    return -1 - slot


@dataclass(frozen=True, slots=True)
class StagingLayout:
    """Offsets, in int32 words, of the sections of a staging buffer.

    A step fills the first live entries of each section; what lies behind them is whatever an earlier step
    left there, and is padded on the device.

    Args:
        num_tokens: Room for tokens, T.
        num_rows: Room for rows, R.
        num_logits: Room for rows that a token is drawn for, L.
        max_updates: Room for block ids that the device's block table lacks.

    Attributes:
        header: [4] live tokens, live rows, live draws, 0.
        token_ids: [T], of an id that only the device knows `unknown_token(slot)`.
        position: [T].
        slot_mapping: [T]; 32 bits are enough for any pool.
        query_start: [R + 1].
        context_len: [R].
        row_slot: [R] the row's slot: its row of the device's block table. No slot twice.
        update_first: [R] logical block from which on the row's table changes.
        update_start: [R + 1] where the row's new block ids start in `updates`; then their number.
        logits_index: [L].
        draws: [L, DRAW_WORDS], see `worker.kernels.draw_words`.
        updates: [max_updates] block ids, those of each row for consecutive logical blocks.
        num_words: Of the buffer.

    Raises:
        ValueError: A number is below 1, `max_updates` below 0.
    """

    num_tokens: int
    num_rows: int
    num_logits: int
    max_updates: int
    header: int = field(init=False)
    token_ids: int = field(init=False)
    position: int = field(init=False)
    slot_mapping: int = field(init=False)
    query_start: int = field(init=False)
    context_len: int = field(init=False)
    row_slot: int = field(init=False)
    update_first: int = field(init=False)
    update_start: int = field(init=False)
    logits_index: int = field(init=False)
    draws: int = field(init=False)
    updates: int = field(init=False)
    num_words: int = field(init=False)

    def __post_init__(self) -> None:
        for name, least in (("num_tokens", 1), ("num_rows", 1), ("num_logits", 1), ("max_updates", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is below {least}")
        tokens, rows = self.num_tokens, self.num_rows
        offset = 0
        for name, num_words in (
            ("header", HEADER_WORDS),
            ("token_ids", tokens),
            ("position", tokens),
            ("slot_mapping", tokens),
            ("query_start", rows + 1),
            ("context_len", rows),
            ("row_slot", rows),
            ("update_first", rows),
            ("update_start", rows + 1),
            ("logits_index", self.num_logits),
            ("draws", self.num_logits * DRAW_WORDS),
            ("updates", self.max_updates),
        ):
            object.__setattr__(self, name, offset)
            offset += -(-num_words // _ALIGNMENT) * _ALIGNMENT
        object.__setattr__(self, "num_words", offset)
