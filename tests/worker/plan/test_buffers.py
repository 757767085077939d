import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.plan import plan_cases
from tests.worker.plan.plan_cases import live_inputs, row_of
from worker.batch import Row
from worker.plan.buffers import StepBuffers
from worker.plan.program import Capacity

BLOCK = 16
DECODE_BYTES = 4 + 4 + 8 + 4


def buffers_of(*, tokens: int = 64, rows: int = 3, blocks: int = 4) -> StepBuffers:
    return plan_cases.buffers_of(Capacity(tokens, rows, blocks), block_size=BLOCK)


def seen(buffers: StepBuffers, rows: list[Row]) -> list[tuple]:
    """What a program reads of each row, in the order of `rows`, without the order of slots."""
    inputs, places = live_inputs(buffers, rows)
    parts = []
    of_row = iter(places)
    for row in rows:
        place = next(of_row) if row.wants_logits else None
        slot = buffers.slot(row.session_id)
        first, end = inputs.query_start[slot : slot + 2].tolist()
        context = int(inputs.context_len[slot])
        parts.append(
            (
                inputs.token_ids[first:end].tolist(),
                inputs.position[first:end].tolist(),
                inputs.slot_mapping[first:end].tolist(),
                context,
                inputs.block_table[slot, : -(-context // BLOCK)].tolist(),
                None if place is None else int(inputs.logits_index[place]) - first,
            )
        )
    taken = {buffers.slot(row.session_id) for row in rows}
    counts = inputs.query_start.diff()
    assert {slot for slot, count in enumerate(counts.tolist()) if count} == taken
    assert inputs.query_start[0] == 0
    assert inputs.query_start[-1] == len(inputs.token_ids)
    assert sorted(places) == list(range(len(inputs.logits_index)))
    assert next(of_row, None) is None
    return parts


def test_a_row_is_laid_out_as_the_step_wants_it():
    buffers = buffers_of()
    assert seen(buffers, [row_of("a", 3, 15, (7, 2, 9))]) == [
        (
            list(row_of("a", 3, 15, (7, 2, 9)).token_ids),
            [15, 16, 17],
            [7 * 16 + 15, 2 * 16, 2 * 16 + 1],
            18,
            [7, 2],
            2,
        )
    ]


def test_steady_decode_writes_only_what_changed():
    buffers = buffers_of()
    buffers.bind([row_of("a", 5, 0, (3,)), row_of("b", 16, 0, (8,))])
    first = buffers.bind([row_of("a", 1, 5, (3,)), row_of("b", 1, 16, (8, 4))])
    assert first.num_bytes == 2 * DECODE_BYTES + 4 + 4 * (2 + 2)  # a block border, and another layout
    for step in range(1, 11):
        bound = buffers.bind([row_of("b", 1, 16 + step, (8, 4)), row_of("a", 1, 5 + step, (3,))])
        assert bound.num_bytes == 2 * DECODE_BYTES
        assert bound.places == (1, 0)
    border = buffers.bind([row_of("a", 1, 16, (3, 60)), row_of("b", 1, 27, (8, 4))])
    assert border.num_bytes == 2 * DECODE_BYTES + 4


def test_a_moved_table_is_written_again():
    buffers = buffers_of()
    buffers.bind([row_of("a", 40, 0, (3, 5, 6))])
    buffers.bind([row_of("a", 1, 40, (3, 5, 6))])
    moved = buffers.bind([row_of("a", 1, 41, (9, 5, 7))])
    assert moved.num_bytes == DECODE_BYTES + 2 * 4
    assert buffers.inputs.block_table[0, :3].tolist() == [9, 5, 7]
    shorter = buffers.bind([row_of("a", 1, 3, (9,))])
    assert shorter.num_bytes == DECODE_BYTES
    grown = buffers.bind([row_of("a", 30, 4, (9, 5, 2))])
    assert grown.num_bytes == 30 * 16 + 4 + 4 + 4 * (1 + 1)
    assert buffers.inputs.block_table[0, :3].tolist() == [9, 5, 2]


def test_a_session_keeps_its_slot_and_the_one_unused_longest_goes():
    buffers = buffers_of(rows=3)
    for name in "abc":
        buffers.bind([row_of(name)])
    buffers.bind([row_of("a", position=1)])
    assert [buffers.slot(name) for name in "abc"] == [0, 1, 2]
    buffers.bind([row_of("d", blocks=(8,)), row_of("c", position=1, blocks=(9,))])
    assert [buffers.slot(name) for name in "abcd"] == [0, None, 2, 1]
    buffers.bind([row_of("b", position=1), row_of("e", blocks=(1,))])
    assert [buffers.slot(name) for name in "abcde"] == [None, 0, 2, None, 1]


def test_a_slot_left_out_has_no_tokens_and_keeps_its_table():
    buffers = buffers_of()
    buffers.bind([row_of("a", blocks=(3,)), row_of("b", blocks=(4,)), row_of("c", blocks=(5,))])
    inputs, places = live_inputs(buffers, [row_of("c", position=1, blocks=(5,))])
    assert inputs.query_start.tolist() == [0, 0, 0, 1]
    assert places == (0,)
    back = buffers.bind([row_of(name, position=2, blocks=(3 + i,)) for i, name in enumerate("abc")])
    assert back.num_bytes == 3 * DECODE_BYTES + 4 * (3 + 3)


def test_more_sessions_over_time_than_slots():
    buffers = buffers_of(rows=2)
    for step in range(50):
        rows = [row_of(f"s{step}", 2, 0, (step,)), row_of(f"s{step + 1}", 1, 0, (step + 1,))]
        assert seen(buffers, rows) == seen(buffers_of(), rows)
    assert buffers.slot("s0") is None
    assert {buffers.slot("s49"), buffers.slot("s50")} == {0, 1}


@st.composite
def batches(draw) -> list[list[Row]]:
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        names = draw(st.permutations("abcdef"))[: draw(st.integers(1, 3))]
        rows = []
        for name in names:
            position, count = draw(st.integers(0, 40)), draw(st.integers(1, 20))
            wanted = -(-(position + count) // BLOCK)
            own = 64 * "abcdef".index(name)
            table = draw(st.lists(st.integers(own, own + 63), min_size=wanted, max_size=4, unique=True))
            rows.append(row_of(name, count, position, table, wants_logits=draw(st.booleans())))
        steps.append(rows)
    return steps


@settings(deadline=None, max_examples=150)
@given(batches())
def test_after_any_steps_a_program_reads_what_fresh_buffers_hold(steps):
    held = buffers_of()
    for rows in steps:
        assert seen(held, rows) == seen(buffers_of(), rows)


def spoiled(draw, rows: list[Row]) -> list[Row]:
    """The rows with one value that is wrong, or as they are."""
    index = draw(st.integers(0, len(rows) - 1))
    row = rows[index]
    last = (*row.token_ids[:-1], draw(st.sampled_from([-1, 256])))
    wrong = draw(
        st.sampled_from(
            [
                row,
                row._replace(token_ids=last),
                row._replace(token_ids=()),
                row._replace(position=-1),
                row._replace(position=70),
                row._replace(position=row.position + 30),
                row._replace(block_table=row.block_table[:-1]),
                row._replace(block_table=(*row.block_table, 5, 6, 7, 8)),
                row._replace(block_table=(*row.block_table[:-1], draw(st.sampled_from([-1, 1024])))),
                row._replace(block_table=(row.block_table[0],) * len(row.block_table)),
                row._replace(block_table=rows[0].block_table),
                row._replace(session_id=rows[0].session_id),
            ]
        )
    )
    return [*rows[:index], wrong, *rows[index + 1 :]]


@st.composite
def batches_and_spoiled_ones(draw) -> list[list[Row]]:
    """Each step comes once more with its rows one token on, as it is in decoding, and either may be wrong."""
    steps = []
    for rows in draw(batches()):
        once_more = [
            row._replace(position=row.position + draw(st.integers(0, 1)), token_ids=row.token_ids)
            for row in rows
        ]
        steps += [spoiled(draw, rows), spoiled(draw, once_more)]
    return steps


@settings(deadline=None, max_examples=300)
@given(batches_and_spoiled_ones())
def test_a_step_is_refused_as_its_check_says_and_leaves_no_trace(steps):
    held = buffers_of()
    for rows in steps:
        slots = [held.slot(name) for name in "abcdef"]
        try:
            held._limits.check(rows)
        except ValueError as error:
            with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
                held.bind(rows)
            assert [held.slot(name) for name in "abcdef"] == slots
        else:
            assert seen(held, rows) == seen(buffers_of(), rows)


class Interrupted(BaseException):
    pass


def interrupt_bind(buffers: StepBuffers, rows: list[Row], after_lines: int) -> bool:
    """Binds, and raises at the line of the buffers' code that comes after so many; whether there was one."""
    lines = 0

    def trace(frame, event, _argument):
        nonlocal lines
        if not frame.f_code.co_filename.endswith("buffers.py"):
            return None
        if event == "line":
            lines += 1
            if lines > after_lines:
                raise Interrupted
        return trace

    sys.settrace(trace)
    try:
        buffers.bind(rows)
    except Interrupted:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_at_any_line_leaves_no_trace():
    """As Ctrl-C does, or memory that runs out: the buffers forget before they write."""
    first = [row_of("a", 3, 15, (7, 2, 9)), row_of("b", 1, 4, (30,), wants_logits=False)]
    moved = [row_of("a", 3, 18, (8, 2, 10)), row_of("b", 1, 5, (31,), wants_logits=False)]
    longer = [row_of("a", 5, 15, (7, 2, 9)), row_of("b", 2, 4, (30,))]
    others = [row_of("d", 5, 0, (40,)), row_of("b", 2, 5, (30,)), row_of("c", 1, 0, (50,))]
    for second in (moved, longer, others):
        after_lines = 0
        is_interrupted = True
        while is_interrupted:
            for third in (first, moved, others):
                held = buffers_of()
                held.bind([row_of("c", 1, 0, (50,))])
                held.bind(first)
                is_interrupted = interrupt_bind(held, second, after_lines)
                for rows in (third, first, moved, others):
                    assert seen(held, rows) == seen(buffers_of(), rows), after_lines
            after_lines += 1
        assert after_lines > 20


def test_no_rows_are_refused_before_the_first_step_too():
    with pytest.raises(ValueError, match="rows is empty"):
        buffers_of().bind([])


def test_a_table_that_its_owner_changes_in_place_is_written_again():
    buffers, table = buffers_of(), [3, 5]
    row = row_of("a", 1, 20)
    buffers.bind([row._replace(block_table=table)])
    table[0] = 9
    buffers.bind([row._replace(block_table=table)])
    assert buffers.inputs.block_table[0, :2].tolist() == [9, 5]


def test_the_buffers_share_memory_with_what_the_program_reads():
    buffers = buffers_of()
    before = [tensor.data_ptr() for tensor in buffers.inputs]
    buffers.bind([row_of("a", 5)])
    assert [tensor.data_ptr() for tensor in buffers.inputs] == before
    np.testing.assert_array_equal(buffers.inputs.position[:5].numpy(), np.arange(5))


def test_another_device_gets_a_copy_of_the_live_parts():
    meta = plan_cases.buffers_of(Capacity(64, 3, 4), block_size=BLOCK, device="meta")
    assert all(tensor.is_meta for tensor in meta.inputs)
    bound = meta.bind([row_of("a", 2), row_of("b", 1, blocks=(9,))])
    tokens, rows = 3, 2
    assert bound.num_bytes == tokens * 16 + rows * (4 * 4 + 4) + 4 * (rows + 1) + 4 * 2


@pytest.mark.parametrize("name", ["num_tokens", "num_rows", "max_blocks"])
def test_a_capacity_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        Capacity(**{"num_tokens": 1, "num_rows": 1, "max_blocks": 1} | {name: 0})
