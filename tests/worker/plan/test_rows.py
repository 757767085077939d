"""The borders of what rows may be: the last value that is fine, and the first that is not."""

import pytest

from worker.batch import DecodePlan, Row
from worker.plan.rows import StepLimits, StepTooLarge

LIMITS = StepLimits(
    num_tokens=64, num_rows=2, max_context_tokens=40, vocab_size=100, block_size=16, num_blocks=8
)


def row(token_ids: tuple[int, ...] = (1,), position: int = 0, table: tuple[int, ...] = (3,)) -> Row:
    return Row("a", token_ids, position, table, True, DecodePlan.PLAN_ONCE)


def test_a_context_that_is_no_multiple_of_the_block_has_room_in_the_last_one() -> None:
    assert LIMITS.capacity.max_blocks == 3
    last = row(position=39, table=(0, 7, 2))
    LIMITS.check([last])
    with pytest.raises(StepTooLarge, match="context_len: wanted 41, limit 40"):
        LIMITS.check([row(position=40, table=(0, 7, 2))])


@pytest.mark.parametrize(
    "fine",
    [
        row((0,)),
        row((99,)),
        row(table=(0,)),
        row(table=(7,)),
        row(table=(1, 2, 3)),
        row((1,) * 40, 0, (4, 5, 6)),
    ],
)
def test_values_at_their_limit_are_fine(fine: Row) -> None:
    LIMITS.check([fine])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (row((100,)), r"token_ids holds an id outside 0\.\.99"),
        (row((5, -1)), r"token_ids holds an id outside 0\.\.99"),
        (row(table=(8,)), r"block_table holds a block outside 0\.\.7"),
        (row(table=(-1,)), r"block_table holds a block outside 0\.\.7"),
        (row(table=(1, -1)), r"block_table holds a block outside 0\.\.7"),
        (row(table=(1, 2, 3, 4)), "block_table has 4 blocks, 1 are needed, 3 at most"),
        (row(position=16), "block_table has 1 blocks, 2 are needed, 3 at most"),
        (row(position=-1), "position=-1 is below 0"),
        (row(()), "token_ids is empty"),
    ],
)
def test_values_past_their_limit_are_refused(wrong: Row, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^rows\[0\]\.{message}"):
        LIMITS.check([wrong])
