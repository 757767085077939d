"""`draw_tokens` against its slow twin, and against the distribution that it claims to draw from."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.worker.sampling_reference import draw_reference, kept_reference
from worker.params import Sampling
from worker.sampling import Draw, draw_tokens

# Quarters tie often, and so do their quotients and products by 2 and 0.5.
_quarters = st.integers(-32, 32).map(lambda number: number / 4)
_logits = st.one_of(_quarters, _quarters, st.floats(-30, 30, width=32), st.just(-0.0))
_shares = st.one_of(st.floats(0, 1, exclude_min=True), st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 1.0]))


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[float], Draw]:
    raw = draw(st.lists(_logits, min_size=1, max_size=40))
    ids = st.integers(0, len(raw) + 2)
    log = draw(st.lists(ids, max_size=30))
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.0, 1e-4, 2e-4, 0.5, 1.0, 1.3, 2.0])),
        top_k=draw(st.none() | st.integers(1, len(raw) + 1)),
        top_p=draw(_shares),
        min_p=draw(st.just(0.0) | _shares),
        seed=draw(st.integers(0, 2**64 - 1)),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.2, 2.0, 100.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -1.3, 2.0])),
        logit_bias=draw(st.dictionaries(ids, st.floats(-100, 100, width=32) | _quarters, max_size=4)),
        logprobs=draw(st.none() | st.integers(0, 20)),
    )
    banned = draw(st.frozensets(ids, max_size=3))
    return raw, Draw(sampling, log, draw(st.integers(0, len(log))), banned)


@given(_cases())
@settings(max_examples=1000, deadline=None)
@example(([0.0] * 10, Draw(Sampling(1.0, seed=1, top_p=0.5), [], 0, frozenset())))
@example(([1.0, 3.0, 3.0, 3.0], Draw(Sampling(1.0, seed=9, top_k=2), [1], 0, frozenset({2}))))
def test_equals_the_reference(case: tuple[list[float], Draw]) -> None:
    raw, draw = case
    (drawn,) = draw_tokens(np.array([raw], np.float32), [draw], vocab_size=len(raw))
    expected = draw_reference(raw, draw)
    if expected is None or drawn is None:
        assert drawn is expected
        return
    assert drawn.token_id == expected.token_id
    if expected.logprob is None:
        assert drawn == expected
        return
    assert drawn.logprob == pytest.approx(expected.logprob, abs=1e-12)
    assert [each.token_id for each in drawn.top] == [each.token_id for each in expected.top]
    assert [each.logprob for each in drawn.top] == pytest.approx(
        [each.logprob for each in expected.top], abs=1e-12
    )


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_k=700),
        Sampling(1.0, top_p=0.9, min_p=0.001),
        Sampling(2.0, min_p=0.05, repetition_penalty=1.3, logit_bias={17: 3.0}),
        Sampling(0.8, top_k=1500, top_p=0.97, presence_penalty=1.0, frequency_penalty=0.5),
    ],
)
def test_equals_the_reference_over_a_large_vocabulary(sampling: Sampling) -> None:
    """NumPy sorts and selects long arrays by other code than short ones; halves tie by the hundred."""
    random = np.random.default_rng(4)
    for seed in range(10):
        raw = (np.round(random.normal(scale=3.0, size=3000) * 2) / 2).astype(np.float32)
        log = random.integers(0, 3000, 200).tolist()
        draw = Draw(replace(sampling, seed=seed), log, 50, frozenset({0, 1}))
        (drawn,) = draw_tokens(raw[None], [draw], vocab_size=3000)
        assert drawn == draw_reference(raw.tolist(), draw)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.7, top_k=9, min_p=0.02, repetition_penalty=1.3),
        Sampling(1.4, top_p=0.8, presence_penalty=1.0, frequency_penalty=-0.5),
        Sampling(1.0, top_k=12, top_p=0.9, min_p=0.05, logit_bias={3: 2.5}),
    ],
)
def test_draws_follow_the_filtered_distribution(sampling: Sampling) -> None:
    """Pearson's statistic over 4,000 seeds; the seeds are fixed, so it is the same on every run."""
    raw = np.random.default_rng(3).normal(scale=1.5, size=24).astype(np.float32)
    log = [3, 3, 5, 8, 21, 5, 3]
    count = 4000
    draws = [
        Draw(replace(sampling, seed=seed), log, num_generated=4, banned=frozenset({7}))
        for seed in range(count)
    ]
    drawn = draw_tokens(np.tile(raw, (count, 1)), draws, vocab_size=24)
    times = Counter(each.token_id for each in drawn if each)
    kept = kept_reference(raw.tolist(), draws[0])
    expected = {token_id: count * weight / sum(kept.values()) for token_id, weight in kept.items()}
    assert times.total() == count
    assert times.keys() <= expected.keys()
    statistic = sum((times[token_id] - share) ** 2 / share for token_id, share in expected.items())
    freedom = len(expected) - 1
    # The statistic has mean `freedom` and variance 2 * freedom.
    assert statistic < freedom + 3 * (2 * freedom) ** 0.5


def _kept(raw: list[float], sampling: Sampling, *, log: tuple[int, ...] = (), generated: int = 0) -> set[int]:
    draws = [Draw(replace(sampling, seed=seed), log, generated, frozenset()) for seed in range(400)]
    rows = np.tile(np.array(raw, np.float32), (400, 1))
    return {each.token_id for each in draw_tokens(rows, draws, vocab_size=len(raw)) if each}


def test_top_k_keeps_exactly_k_and_of_ties_the_lower_ids() -> None:
    assert _kept([1.0, 2.0, 1.0, 1.0, 2.0, 1.0], Sampling(1.0, top_k=4)) == {0, 1, 2, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert _kept([0.0] * 8, Sampling(1.0, top_p=0.5)) == {0, 1, 2, 3}
    assert _kept([0.0] * 8, Sampling(1.0, top_p=0.51)) == {0, 1, 2, 3, 4}
    assert _kept(np.log([0.2, 0.5, 0.3]).tolist(), Sampling(1.0, top_p=0.75)) == {1, 2}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    assert _kept([0.0] * 8, Sampling(1.0, top_k=4, top_p=0.5)) == {0, 1}


def test_min_p_is_relative_to_the_most_likely() -> None:
    shares = np.log([0.4, 0.19, 0.21, 0.2]).tolist()
    assert _kept(shares, Sampling(1.0, min_p=0.51)) == {0, 2}
    assert _kept([1.0, 2.0, 2.0], Sampling(1.0, min_p=1.0)) == {1, 2}


def test_filters_see_the_temperature() -> None:
    shares = np.log([0.5, 0.3, 0.2]).tolist()
    assert _kept(shares, Sampling(0.25, top_p=0.8)) == {0}
    assert _kept(shares, Sampling(2.0, top_p=0.8)) == {0, 1, 2}


def _greedy(raw: list[float], sampling: Sampling, log: list[int], generated: int) -> int:
    draw = Draw(sampling, log, generated, frozenset())
    (drawn,) = draw_tokens(np.array([raw], np.float32), [draw], vocab_size=len(raw))
    assert drawn is not None
    return drawn.token_id


def test_repetition_covers_the_whole_log_once_per_id() -> None:
    penalised = Sampling(repetition_penalty=2.0)
    assert _greedy([4.0, 1.5], penalised, [0, 0, 0], 0) == 0
    assert _greedy([4.0, 2.5], penalised, [0, 0, 0], 0) == 1
    # A negative logit falls too.
    assert _greedy([-1.0, -1.5], penalised, [0], 0) == 1
    assert _greedy([-1.0, -2.5], penalised, [0], 0) == 0


def test_presence_and_frequency_cover_this_generation_only() -> None:
    log = [0, 0, 0, 0, 1]
    for sampling in (Sampling(presence_penalty=1.0), Sampling(frequency_penalty=1.0)):
        assert _greedy([2.0, 1.5], sampling, log, 1) == 0
        assert _greedy([2.0, 1.5], sampling, log, 0) == 0
    assert _greedy([3.0, 1.5], Sampling(presence_penalty=1.0), log, 4) == 0
    assert _greedy([3.0, 1.5], Sampling(frequency_penalty=1.0), log, 4) == 1


def test_bias_comes_after_the_penalties() -> None:
    both = Sampling(repetition_penalty=2.0, logit_bias={0: 1.0})
    assert _greedy([4.0, 2.75], both, [0], 0) == 0  # 4 / 2 + 1, not (4 + 1) / 2
