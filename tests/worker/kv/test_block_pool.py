import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import OutOfBlocks
from worker.kv.block_pool import BlockPool


def test_a_refused_allocation_takes_nothing_and_tells_numbers() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(2)
    assert (caught.value.wanted, caught.value.free) == (2, 1)
    assert pool.num_free == 1


@pytest.mark.parametrize("bad", [[0, 0], [1, 3], [-1], [4]])
def test_a_refused_free_changes_nothing(bad: list[int]) -> None:
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1]
    with pytest.raises(ValueError, match=r"held|twice"):
        pool.free(bad)
    assert pool.num_free == 2
    pool.free([0, 1])
    assert pool.num_free == 4


def test_what_was_freed_last_is_reused_last_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    first = pool.allocate(2)
    pool.free(first)
    assert pool.allocate(4) == [2, 3, 1, 0]


@given(st.lists(st.integers(0, 5), max_size=60))
def test_no_block_has_two_holders(sizes: list[int]) -> None:
    pool = BlockPool(16)
    held: list[list[int]] = []
    for size in sizes:
        try:
            held.append(pool.allocate(size))
        except OutOfBlocks:
            pool.free(held.pop(0) if held else [])
        flat = [block for blocks in held for block in blocks]
        assert len(set(flat)) == len(flat)
        assert pool.num_free + len(flat) == 16
