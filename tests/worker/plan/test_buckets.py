"""Which sizes launch lists have, and which of them a step takes."""

import pytest

from worker.plan.buckets import Bucket, bucket_for, buckets_of


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (100, [1, 2, 4, 8, 16, 32, 64, 100]),
        (128, [1, 2, 4, 8, 16, 32, 64, 128]),
    ],
)
def test_sizes_are_powers_of_two_and_the_most(most: int, sizes: list[int]) -> None:
    buckets = buckets_of(max_step_tokens=most, max_step_rows=1)
    assert [bucket.num_tokens for bucket in buckets] == sizes


def test_rows_are_no_more_than_tokens_and_than_a_step_has() -> None:
    buckets = buckets_of(max_step_tokens=20, max_step_rows=6)
    assert buckets == (Bucket(1, 1), Bucket(2, 2), Bucket(4, 4), Bucket(8, 6), Bucket(16, 6), Bucket(20, 6))


def test_a_step_takes_the_smallest_that_it_fits() -> None:
    buckets = buckets_of(max_step_tokens=20, max_step_rows=20)
    taken = [bucket_for(buckets, count).num_tokens for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 20)]
    assert taken == [1, 2, 4, 4, 8, 8, 16, 16, 20, 20]
    with pytest.raises(ValueError, match="num_tokens=21 is over 20"):
        bucket_for(buckets, 21)


@pytest.mark.parametrize("name", ["max_step_tokens", "max_step_rows"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        buckets_of(**{"max_step_tokens": 4, "max_step_rows": 4} | {name: 0})
