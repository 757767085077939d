import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.plan.arena import Lifetime, place

lifetimes = st.lists(
    st.builds(
        lambda floats, first, length: Lifetime(16 * floats, first, first + length),
        st.integers(1, 40),
        st.integers(0, 30),
        st.integers(0, 8),
    ),
    max_size=30,
)


@given(lifetimes)
def test_results_that_live_together_never_overlap(lives):
    placement = place(lives)
    spans = [
        (offset, offset + life.num_floats) for offset, life in zip(placement.offsets, lives, strict=True)
    ]
    for one, life in enumerate(lives):
        for other in range(one):
            together = {*range(life.first, life.last + 1)} & {
                *range(lives[other].first, lives[other].last + 1)
            }
            (start, end), (other_start, other_end) = spans[one], spans[other]
            assert not together or end <= other_start or other_end <= start


@given(lifetimes)
def test_the_arena_is_aligned_and_between_the_peak_and_the_sum(lives):
    placement = place(lives)
    assert all(offset % 16 == 0 and offset >= 0 for offset in placement.offsets)
    at_once = [sum(life.num_floats for life in lives if life.first <= t <= life.last) for t in range(40)]
    assert max(at_once) <= placement.num_floats <= sum(life.num_floats for life in lives)


@pytest.mark.parametrize(
    ("lives", "num_floats"),
    [
        ([], 0),
        ([(16, 0, 0)], 16),
        # A chain: each is read by the launch that writes the next; two pieces take turns.
        ([(32, 0, 1), (32, 1, 2), (32, 2, 3), (32, 3, 4)], 64),
        # Another small one that lives through: it lies over both of them.
        ([(16, 0, 4), (32, 0, 1), (32, 1, 2), (32, 2, 3)], 80),
        # Two small ones take the place of a large one.
        ([(64, 0, 1), (32, 2, 4), (32, 3, 5)], 64),
        # What nothing reads has memory while its launch runs.
        ([(32, 0, 2), (48, 1, 1), (48, 2, 2)], 80),
    ],
)
def test_small_cases_take_the_least(lives, num_floats):
    assert place([Lifetime(*life) for life in lives]).num_floats == num_floats


def test_outputs_lie_beside_the_inputs_of_their_launch():
    placement = place([Lifetime(16, 0, 1), Lifetime(16, 1, 1)])
    assert sorted(placement.offsets) == [0, 16]
