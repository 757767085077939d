"""From rows to a device's inputs: what is copied, and what the reference's `bind_step` makes of it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.worker.plan.device_cases import POISON, DelayDevice
from tests.worker.plan.plan_cases import buffers_of, live_inputs, row_of
from worker.batch import UNKNOWN_TOKEN, DecodePlan, Row
from worker.kernels import draw_words
from worker.kernels.reference.bind_step import bind_step
from worker.params import Sampling
from worker.plan.buckets import Bucket
from worker.plan.draw_params import MAX_ENTRIES
from worker.plan.graph import StepInputs
from worker.plan.rows import StepLimits
from worker.plan.staging import Staging
from worker.sampling import Draw

LIMITS = StepLimits(
    num_tokens=64, num_rows=8, max_context_tokens=128, vocab_size=256, block_size=16, num_blocks=1024
)


class World:
    """A staging on a device that delays, which runs `bind_step` after every step's copies."""

    def __init__(self) -> None:
        self.device = DelayDevice()
        self.staging = Staging(LIMITS, self.device)

    def bind(self, rows: Sequence[Row], bucket: Bucket, draws: Sequence[Draw | None] | None = None):
        """Stages a step; returns what was copied and, once all is done, the inputs at the bucket's sizes."""
        staging = self.staging
        staging.check(rows)
        if draws is None:
            draws = [None] * sum(row.wants_logits for row in rows)
        for tensor in staging.inputs:
            self.device.copy(tensor, torch.full_like(tensor, -77))
        staged = staging.stage(rows, draws, bucket)
        inputs = staging.inputs_of(bucket)
        self.device.run(
            lambda: bind_step(
                staging.words,
                staging.layout(bucket),
                inputs,
                staging.block_table,
                staging.fed,
                num_tokens=bucket.num_tokens,
                num_rows=bucket.num_rows,
                num_logits=bucket.num_rows,
                block_size=LIMITS.block_size,
            )
        )
        self.device.mark().wait()
        return staged, StepInputs(*(tensor.clone() for tensor in inputs))


STEPS = [
    [row_of("a", 20, 0, (3, 5)), row_of("b", 1, 15, (9,), wants_logits=False)],
    [row_of("c", 1, 0, (11,))],
    [row_of("a", 1, 20, (3, 5)), row_of("c", 17, 1, (11, 2)), row_of("b", 1, 16, (9, 40))],
    [row_of("b", 7, 100, tuple(range(500, 508)), wants_logits=False)],
    [row_of("c", 1, 18, (12, 2)), row_of("a", 1, 21, (3, 5))],
]


@pytest.mark.parametrize("bucket", [Bucket(64, 8), Bucket(40, 4)])
def test_inputs_are_those_of_the_buffers_of_the_host_padded(bucket: Bucket) -> None:
    world = World()
    for rows in STEPS:
        _, inputs = world.bind(rows, bucket)
        # Rows of these buffers come in the order of sessions that never had one.
        expected, places = live_inputs(buffers_of(LIMITS.capacity), rows)
        assert places == tuple(range(len(places)))
        tokens, count, logits = len(expected.token_ids), len(rows), len(expected.logits_index)
        for name, live, padding in (
            ("token_ids", tokens, 0),
            ("position", tokens, 0),
            ("slot_mapping", tokens, -1),
            ("context_len", count, 0),
            ("logits_index", logits, 0),
            ("query_start", count + 1, tokens),
        ):
            got = getattr(inputs, name)
            assert got[:live].tolist() == getattr(expected, name).tolist(), name
            assert set(got[live:].tolist()) <= {padding}, name
        for place, row in enumerate(rows):
            used = -(-row.context_len // 16)
            assert inputs.block_table[place, :used].tolist() == list(row.block_table[:used])


def test_only_what_is_new_of_a_table_is_copied() -> None:
    world = World()
    bucket = Bucket(64, 8)
    first, _ = world.bind([row_of("a", 20, 0, tuple(range(8)))], bucket)
    again, _ = world.bind([row_of("a", 1, 20, tuple(range(8)))], bucket)
    grown, _ = world.bind([row_of("a", 1, 21, (*range(7), 9))], bucket)
    # Eight blocks but block 0, which an untouched table holds anyway.
    assert (first.num_bytes - again.num_bytes, grown.num_bytes - again.num_bytes) == (4 * 7, 4)
    assert again.num_bytes == 4 * world.staging.layout(bucket).updates


def test_an_unknown_token_is_the_one_that_was_drawn_for_the_session() -> None:
    world = World()
    bucket = Bucket(8, 4)
    rows = [row_of("a", 2, 0, (3,)), row_of("b", 1, 0, (4,)), row_of("c", 1, 0, (5,))]
    draw = Draw(Sampling(), (1, 2), 0, frozenset())
    world.bind(rows, bucket, [draw, draw, None])
    slots = {name: world.staging.slots.slot(name) for name in "abc"}
    world.staging.fed[slots["a"]] = 77
    world.staging.fed[slots["b"]] = -1  # no token could be told

    def unknown(name: str, position: int, block: int) -> Row:
        return Row(name, (UNKNOWN_TOKEN,), position, (block,), True, DecodePlan.PLAN_ONCE)

    _, inputs = world.bind([unknown("b", 1, 4), unknown("a", 2, 3)], bucket, [draw, draw])
    assert inputs.token_ids.tolist() == [0, 77, 0, 0, 0, 0, 0, 0]
    for name in "cd":
        with pytest.raises(ValueError, match=r"rows\[0\]\.token_ids holds an id outside"):
            world.bind([unknown(name, 1, 5)], bucket)


def test_draws_and_their_entries_travel() -> None:
    world = World()
    bucket = Bucket(8, 4)
    rows = [row_of(name, 1, 0, (place,)) for place, name in enumerate("abc")]
    draws = [
        Draw(Sampling(temperature=0.5, seed=3), (1,), 0, frozenset({4, 5})),
        None,
        Draw(Sampling(logit_bias={7: 1.5}), (1,), 0, frozenset()),
    ]
    world.bind(rows, bucket)
    plain, _ = world.bind(rows, bucket)
    staged, _ = world.bind(rows, bucket, draws)
    assert staged.num_logits == 3
    assert staged.num_bytes == plain.num_bytes + 3 * 16
    layout = world.staging.layout(bucket)
    words = world.staging.words[layout.draws :][: 4 * draw_words.DRAW_WORDS].view(4, -1)
    assert words[:, draw_words.NUM_ENTRIES].tolist() == [2, 0, 1, 0]
    assert words[:, draw_words.FIRST_ENTRY].tolist() == [0, 0, 2, 0]
    assert [bool(flags) for flags in words[:, draw_words.FLAGS]] == [True, False, True, False]
    assert words[[0, 2], draw_words.SLOT].tolist() == [0, 2]
    ids = world.staging.entries[:3, draw_words.TOKEN_ID].tolist()
    assert (set(ids[:2]), ids[2]) == ({4, 5}, 7)


def test_entries_have_room_for_the_most_of_every_row() -> None:
    world = World()
    rows = [row_of(str(place), 1, 0, (place,)) for place in range(8)]
    draws = [Draw(Sampling(), (1,), 0, frozenset(range(MAX_ENTRIES))) for _ in rows]
    world.bind(rows, Bucket(8, 8), draws)
    ids = world.staging.entries[:, draw_words.TOKEN_ID].view(8, MAX_ENTRIES)
    assert torch.equal(ids.sort().values, torch.arange(MAX_ENTRIES, dtype=torch.int32).expand(8, -1))


@pytest.mark.parametrize("failing", [1, 2])
def test_what_raises_in_a_bind_is_made_good_by_the_next(monkeypatch, failing: int) -> None:
    """The device's table is written whole, since nobody knows how much of it was copied."""
    world = World()
    bucket = Bucket(64, 8)
    draw = Draw(Sampling(logit_bias={7: 1.5}), (1,), 0, frozenset())
    world.bind(STEPS[0], bucket, [draw])
    assert world.staging.slots.is_fed("a")
    copies_left = failing

    def fails(target, source):
        nonlocal copies_left
        copies_left -= 1
        if not copies_left:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(world.device, "copy", fails)
        with pytest.raises(MemoryError):
            world.staging.stage(STEPS[2], [draw] * 3, bucket)
    assert not world.staging.slots.is_fed("a")
    whole = world.staging.block_table
    staged, inputs = world.bind(STEPS[2], bucket)
    assert staged.num_bytes > whole.nbytes
    np.testing.assert_array_equal(whole.numpy(), world.staging.slots.tables)
    assert inputs.block_table[1, :2].tolist() == [11, 2]
    staged, _ = world.bind(STEPS[4], bucket)
    assert staged.num_bytes == 4 * (world.staging.layout(bucket).updates + 1)


def test_host_memory_that_was_never_written_is_not_read() -> None:
    world = World()
    assert int(world.staging._buffers[0].words[0]) == POISON
    _, inputs = world.bind(STEPS[1], Bucket(64, 8))
    for tensor in inputs:
        assert not (tensor == POISON).any()
