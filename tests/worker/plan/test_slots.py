"""Slots of sessions: who keeps one, who takes over whose, and which part of a table has to travel."""

import numpy as np
import pytest

from worker.plan.slots import Slots


def test_a_session_keeps_its_slot_and_a_new_one_takes_the_lowest_free() -> None:
    slots = Slots(4, 8)
    assert slots.seat(["a", "b"]) == [0, 1]
    assert slots.seat(["c", "a"]) == [2, 0]
    assert slots.seat(["b"]) == [1]
    assert [slots.slot(name) for name in "abcz"] == [0, 1, 2, None]


def test_the_slot_unused_longest_is_taken_over_and_never_one_of_the_step() -> None:
    slots = Slots(3, 8)
    slots.seat(["a", "b", "c"])
    slots.seat(["a", "c"])
    assert slots.seat(["d", "a"]) == [1, 0]
    assert slots.slot("b") is None
    assert slots.seat(["b", "e", "d"]) == [2, 0, 1]


@pytest.mark.parametrize(
    ("before", "table", "first", "blocks"),
    [
        ((), (5, 6, 7), 0, [5, 6, 7]),
        ((5, 6), (5, 6, 7, 8), 2, [7, 8]),
        ((5, 6, 7), (5, 6, 7), 0, []),
        ((5, 6, 7), (5, 6), 0, []),
        ((5, 6, 7), (5, 9, 7), 1, [9]),
        ((5, 6, 7, 8), (1, 6, 3, 8), 0, [1, 6, 3]),
    ],
)
def test_what_changes_travels(
    before: tuple[int, ...], table: tuple[int, ...], first: int, blocks: list[int]
) -> None:
    slots = Slots(2, 4)
    slots.seat(["a"])
    slots.update(0, before)
    changed = slots.update(0, table)
    assert (changed[0], changed[1].tolist()) == (first, blocks)
    assert slots.tables[0, : len(table)].tolist() == list(table)
    assert slots.table("a") == table
    assert not slots.tables[1].any()
    assert slots.update(0, table)[1].size == 0


def test_a_table_that_was_taken_over_is_compared_with_what_is_there() -> None:
    """The next session's, and that of a session that comes back."""
    slots = Slots(1, 4)
    slots.seat(["a"])
    slots.update(0, (1, 2, 3))
    slots.seat(["b"])
    assert slots.table("a") == slots.table("b") == ()
    assert slots.update(0, (1, 5))[1].tolist() == [5]
    slots.seat(["a"])
    first, blocks = slots.update(0, (1, 2, 3))
    assert (first, blocks.tolist()) == (1, [2])
    np.testing.assert_array_equal(slots.tables, [[1, 2, 3, 0]])


def test_a_token_on_the_device_is_the_sessions_own() -> None:
    slots = Slots(2, 4)
    slots.seat(["a", "b"])
    slots.feed(0, is_fed=True)
    slots.feed(1, is_fed=True)
    assert [slots.is_fed(name) for name in "abc"] == [True, True, False]
    slots.forget([1])
    assert [slots.is_fed(name) for name in "ab"] == [True, False]
    assert not slots.is_known
    slots.seat(["b"])
    slots.seat(["c"])
    assert slots.slot("c") == 0
    assert [slots.is_fed(name) for name in "abc"] == [False, False, False]


def test_a_table_that_is_too_long_is_refused_and_known_to_nobody() -> None:
    slots = Slots(1, 2)
    slots.seat(["a"])
    slots.update(0, (1, 2))
    with pytest.raises(ValueError, match="shape"):
        slots.update(0, (1, 2, 3))
    assert slots.table("a") == ()
