from collections import Counter
from collections.abc import Callable

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
    with pytest.raises(ValueError, match="count is -1"):
        pool.allocate(-1)
    assert pool.num_free == 1


@pytest.mark.parametrize("bad", [[0, 0], [1, 3], [-1], [4]])
@pytest.mark.parametrize("call", [BlockPool.share, BlockPool.release])
def test_a_refused_call_changes_nothing(
    call: Callable[[BlockPool, list[int]], object], bad: list[int]
) -> None:
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1]
    with pytest.raises(ValueError, match=r"held|twice|not in a pool"):
        call(pool, bad)
    assert [pool.num_holders(block) for block in range(4)] == [1, 1, 0, 0]
    assert pool.release([0, 1]) == (0, 1)
    assert pool.num_free == 4


def test_a_block_is_free_when_its_last_holder_has_released_it() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.share(blocks[:2])
    pool.share(blocks[:1])
    assert pool.release(blocks) == (2,)
    assert pool.release(blocks[:2]) == (1,)
    assert [pool.num_holders(block) for block in blocks] == [1, 0, 0]
    assert pool.release([0]) == (0,)
    with pytest.raises(ValueError, match="block 0 is not held"):
        pool.release([0])
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_what_was_freed_last_is_reused_last_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    pool.release(pool.allocate(2))
    assert pool.allocate(4) == [2, 3, 1, 0]


@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_that_is_not_in_the_pool_has_no_holders_to_count(block: int) -> None:
    with pytest.raises(ValueError, match="is not in a pool of 4"):
        BlockPool(4).num_holders(block)


def test_a_pool_has_blocks() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["allocate", "share", "release"])), max_size=60))
def test_counts_are_those_of_the_holders(calls: list[tuple[int, str]]) -> None:
    pool = BlockPool(16)
    held: list[list[int]] = []
    for size, call in calls:
        if call == "allocate" and size <= pool.num_free:
            held.append(pool.allocate(size))
        elif call == "share" and held:
            pool.share(held[size % len(held)])
            held.append(list(held[size % len(held)]))
        elif held:
            released = held.pop(size % len(held))
            still_held = {block for blocks in held for block in blocks}
            assert pool.release(released) == tuple(block for block in released if block not in still_held)
        holders = Counter(block for blocks in held for block in blocks)
        assert [pool.num_holders(block) for block in range(16)] == [holders[block] for block in range(16)]
        assert pool.num_free == 16 - len(holders)
