"""Draws in native code, beside the host's and the reference of the operator."""

from dataclasses import replace

import numpy as np
import pagecast_native
import pytest

from tests.worker.kernels.sample_cases import NOT_BANNED, any_draw, rows_that_tie
from worker.batch import UNKNOWN_TOKEN, Drawn
from worker.params import Sampling
from worker.plan.native_draws import NativeDraws
from worker.sampling import Draw, draw_tokens


@pytest.fixture(params=[1, 2])
def team(request):
    team = pagecast_native.Team(request.param)
    yield team
    team.close()


def draws_of(team, logits, *, vocab_size):
    """Draws behind a program that has no launches, from logits that are there already."""
    program = pagecast_native.Program(team, max_tokens=1, max_rows=1)
    return NativeDraws(team, program, logits, vocab_size=vocab_size)


def drawn_by(draws):
    return draws.run_and_draw(0, 0, 0)[2]


def expect_same(found, expected):
    """Ids to the last one; logprobs are float32 where native code tells them."""
    assert len(found) == len(expected)
    for mine, host in zip(found, expected, strict=True):
        if host is None or host.top or host.logprob is None:
            assert mine == host
        else:
            assert mine.token_id == host.token_id
            assert mine.logprob == pytest.approx(host.logprob, abs=1e-5, rel=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 7, 129, 1000, 5000])
def test_draws_what_the_host_draws(team, vocab_size):
    random = np.random.default_rng(vocab_size)
    count = 40
    filtered = 0
    for _ in range(10):
        logits = rows_that_tie(random, count, vocab_size + 2)
        logits[5, 0], logits[6, vocab_size], logits[7, vocab_size - 1] = np.nan, np.nan, -np.inf
        before = logits.copy()
        draws = draws_of(team, logits, vocab_size=vocab_size)
        for _ in range(3):
            given = [any_draw(random, vocab_size) for _ in range(count)]
            for index in range(0, count, 9):
                given[index] = given[index]._replace(sampling=replace(given[index].sampling, logprobs=3))
            places = random.permutation(count)[: random.integers(1, count + 1)]
            places = np.argsort(np.argsort(places)).tolist()
            draws.prepare(places, given[: len(places)])
            expected = draw_tokens(
                [logits[place] for place in places], given[: len(places)], vocab_size=vocab_size
            )
            expect_same(drawn_by(draws), expected)
            assert logits.tobytes() == before.tobytes(), "entries were not taken back"
            filtered += sum(each is not None for each in expected)
    assert filtered > 100


def test_long_vocabularies_and_ties(team):
    """Where candidates are looked for in part of the row, and where all of it ties."""
    random = np.random.default_rng(2)
    vocab_size = 49_152
    shapes = [
        np.zeros(vocab_size),
        random.normal(scale=0.01, size=vocab_size),
        random.normal(scale=3.0, size=vocab_size),
        np.round(random.normal(scale=3.0, size=vocab_size)),
        np.arange(vocab_size)[::-1] / 1000.0,
        np.where(np.arange(vocab_size) % 1000, -8.0, 3.0),
    ]
    samplings = [
        Sampling(),
        Sampling(1.0),
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_k=50),
        Sampling(0.7, top_k=9000, top_p=0.97),
        Sampling(0.7, top_p=0.9),
        Sampling(1.3, top_p=0.9999, min_p=1e-4),
        Sampling(1.0, top_p=1.0 - 2**-53),
        Sampling(1.0, top_p=5e-324),
        Sampling(1.0, min_p=0.05),
    ]
    logits = np.repeat(np.array(shapes, np.float32), len(samplings), axis=0)
    given = [
        Draw(replace(sampling, seed=seed), range(seed), 0, NOT_BANNED)
        for seed in range(len(shapes))
        for sampling in samplings
    ]
    draws = draws_of(team, logits, vocab_size=vocab_size)
    draws.prepare(range(len(given)), given)
    assert drawn_by(draws) == draw_tokens(list(logits), given, vocab_size=vocab_size)


def test_a_row_draws_the_same_in_any_company_and_team():
    random = np.random.default_rng(3)
    logits = rows_that_tie(random, 17, 3000)
    given = [any_draw(random, 2990) for _ in range(17)]
    alone = []
    one = pagecast_native.Team(1)
    for row in range(17):
        draws = draws_of(one, logits[row : row + 1], vocab_size=2990)
        draws.prepare([0], given[row : row + 1])
        alone += drawn_by(draws)
    assert len({each.token_id for each in alone if each}) > 5
    for num_threads in (1, 2, 3):
        draws = draws_of(pagecast_native.Team(num_threads), logits, vocab_size=2990)
        for _ in range(10):
            order = random.permutation(17)
            draws.prepare(order.tolist(), [given[row] for row in order])
            assert drawn_by(draws) == [alone[row] for row in order]


def test_words_that_stay_follow_position_parameters_and_bans(team):
    """What is kept from step to step never outlives its parameters."""
    random = np.random.default_rng(4)
    logits = rows_that_tie(random, 2, 300)
    draws = draws_of(team, logits, vocab_size=300)
    plain, other = Sampling(1.5, seed=1), Sampling(1.5, seed=2, top_k=5)
    penalised = Sampling(1.5, seed=1, repetition_penalty=3.0)
    written = []
    for step, sampling, banned in [
        (3, plain, NOT_BANNED),
        (4, plain, NOT_BANNED),
        (5, plain, frozenset(range(0, 300, 2))),
        (6, plain, NOT_BANNED),
        (7, other, NOT_BANNED),
        (8, other, NOT_BANNED),
        (9, penalised, NOT_BANNED),
        (10, penalised, NOT_BANNED),
        (11, replace(plain, logprobs=2), NOT_BANNED),
        (12, plain, NOT_BANNED),
    ]:
        given = [Draw(sampling, list(range(step)), 1, banned), Draw(plain, range(2 * step), 0, NOT_BANNED)]
        written.append(draws.prepare((1, 0), given))
        expected = draw_tokens([logits[1], logits[0]], given, vocab_size=300)
        assert drawn_by(draws) == expected
    assert written[:2] == [128, 8]
    assert written[3] == 68
    assert written[7] == 64 + 10 * 16 + 4
    assert written[9] == 68


def test_tokens_differ_by_position_where_nothing_else_does(team):
    """So that words which stayed whole would be seen."""
    logits = np.zeros((1, 300), np.float32)
    draws = draws_of(team, logits, vocab_size=300)
    sampling = Sampling(1.0, seed=5)
    drawn = []
    for position in range(20):
        draws.prepare([0], [Draw(sampling, range(position), 0, NOT_BANNED)])
        drawn += drawn_by(draws)
    assert len({each.token_id for each in drawn}) > 15


def test_what_is_refused_draws_nothing_and_harms_no_later_step(team):
    logits = rows_that_tie(np.random.default_rng(5), 2, 50)
    draws = draws_of(team, logits, vocab_size=50)
    plain = Sampling(1.0, seed=3)
    good = [Draw(plain, range(4), 0, NOT_BANNED)] * 2
    expected = draw_tokens(list(logits), good, vocab_size=50)
    for _ in range(2):
        draws.prepare((0, 1), good)
        assert drawn_by(draws) == expected
        with pytest.raises(ValueError, match="draws has 1, the step has 2 rows"):
            draws.prepare((0, 1), good[:1])
        unknown = Draw(replace(plain, repetition_penalty=1.1), [3, UNKNOWN_TOKEN], 1, NOT_BANNED)
        with pytest.raises(ValueError, match=r"draw\.log holds a token that is not known yet"):
            draws.prepare((0, 1), [good[0], unknown])
        assert drawn_by(draws) == []
        draws.prepare((0, 1), [good[0], Draw(Sampling(float("nan")), (), 0, NOT_BANNED)])
        with pytest.raises(ValueError, match=r"^draws\[1\]: temperature"):
            drawn_by(draws)


def test_a_row_of_many_entries_is_drawn(team):
    """Beyond what a device's table holds for a row."""
    random = np.random.default_rng(6)
    logits = rows_that_tie(random, 2, 20_000)
    log = random.permutation(20_000)[:9000].tolist()
    sampling = Sampling(1.0, seed=1, repetition_penalty=1.3, frequency_penalty=0.5)
    given = [Draw(sampling, log, 5000, NOT_BANNED), Draw(sampling, log[:10], 3, NOT_BANNED)]
    draws = draws_of(team, logits, vocab_size=20_000)
    draws.prepare((0, 1), given)
    assert drawn_by(draws) == draw_tokens(list(logits), given, vocab_size=20_000)


def test_a_logit_that_is_not_finite_is_told_for_its_row_alone(team):
    logits = rows_that_tie(np.random.default_rng(8), 3, 60)
    logits[1, 59] = np.inf
    draws = draws_of(team, logits, vocab_size=60)
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.5), Sampling(logprobs=1)):
        draws.prepare((0, 1, 2), [Draw(sampling, (), 0, frozenset({59}))] * 3)
        first, broken, last = drawn_by(draws)
        assert broken is None
        assert isinstance(first, Drawn)
        assert isinstance(last, Drawn)


def test_a_row_that_is_held_outlives_the_entries_beside_it(team):
    logits = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)
    draws = draws_of(team, logits, vocab_size=50)
    plain = Draw(Sampling(), [1], 0, frozenset())
    penalised = Draw(Sampling(repetition_penalty=1.2), [3, 4], 0, frozenset())
    draws.prepare([1, 0], [penalised, plain])
    assert None not in drawn_by(draws)
    draws.prepare([0], [plain])
    (found,) = drawn_by(draws)
    assert found is not None
    assert found.token_id == logits[0].argmax()
