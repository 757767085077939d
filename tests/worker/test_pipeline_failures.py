"""Steps that are launched ahead, and fail: NaN, a launch that raises, a read that raises."""

from typing import cast

import pytest

from tests.worker.ahead_harness import alone, make, state_of, told
from tests.worker.fake_device import expected_tokens
from worker.batch import Batch, Failed
from worker.plan.device import DeviceLost


def test_a_nan_row_leaves_nothing_and_its_neighbour_goes_on() -> None:
    every = 5
    bad = next(n for n in range(96) if len(nan_tokens((n, 3), every)) == 3)
    good = next(n for n in range(96) if len(nan_tokens((n, 3), every)) == 12)
    ahead = make(nan_every=every)
    for name, first in (("bad", bad), ("good", good)):
        ahead.open(name)
        ahead.submit(name, (first, 3), stopping={"max_tokens": 12})
    events = ahead.finish()
    failure = events["bad"][-1]
    assert isinstance(failure, Failed)
    assert failure.reason == "NUMERIC_FAILURE"
    assert len(told(ahead, "bad")) == 3
    assert told(ahead, "good") == nan_tokens((good, 3), every)
    assert not ahead.device.holds_garbage()
    assert state_of(ahead, "bad")[:6] == ([], [], 0, None, 0, 0)


def nan_tokens(ids: tuple[int, ...], every: int) -> list[int]:
    found, _ = expected_tokens(
        ids, max_tokens=12, max_context_tokens=1000, ends={}, stop_sequence="", nan_every=every
    )
    return found


@pytest.mark.parametrize("what", ["fails_launch", "fails_read"])
@pytest.mark.parametrize("at", range(6))
def test_a_fault_once_costs_nobody_anything(what: str, at: int) -> None:
    num_calls = 0

    def fail(batch: Batch) -> bool:
        nonlocal num_calls
        num_calls += 1
        return num_calls - 1 == at

    ahead = make(**{what: fail})
    prompts = {"a": (5, 6, 7), "b": (8, 9)}
    for name, ids in prompts.items():
        ahead.open(name)
        ahead.submit(name, ids, stopping={"max_tokens": 6})
    ahead.finish()
    assert len(ahead.errors) == 1
    for name, ids in prompts.items():
        assert told(ahead, name) == alone(ids, 6)
        assert ahead.session(name).num_settled is None


@pytest.mark.parametrize("what", ["fails_launch", "fails_read"])
def test_a_lost_device_ends_the_steps(what: str) -> None:
    """Every later turn would fail, and nobody would start the worker again."""
    ahead = make(is_lost=True, **{what: lambda _: True})
    ahead.open("a")
    ahead.submit("a", (5, 6, 7), stopping={"max_tokens": 6})
    with pytest.raises(DeviceLost):
        ahead.finish()
    assert [str(error) for error in ahead.errors] == [what.removeprefix("fails_")]


@pytest.mark.parametrize("what", ["fails_launch", "fails_read"])
def test_the_row_that_fails_alone_fails_its_turn_and_no_other(what: str) -> None:
    num_bad = 0

    def fail(batch: Batch) -> bool:
        nonlocal num_bad
        num_bad += any(row.session_id == "bad" for row in batch.rows)
        return num_bad > 2 and any(row.session_id == "bad" for row in batch.rows)

    ahead = make(**{what: fail})
    prompts = {"a": (5, 6, 7), "bad": (8, 9), "c": (3,)}
    for name, ids in prompts.items():
        ahead.open(name)
        ahead.submit(name, ids, stopping={"max_tokens": 9})
    events = ahead.finish()
    assert cast("Failed", events["bad"][-1]).reason == "INTERNAL"
    assert told(ahead, "bad") == alone((8, 9), 9)[: len(told(ahead, "bad"))]
    assert state_of(ahead, "bad")[:4] == ([], [], 0, None)
    for name in ("a", "c"):
        assert told(ahead, name) == alone(prompts[name], 9)
    assert {str(error) for error in ahead.errors} == {what.removeprefix("fails_")}
