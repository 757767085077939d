import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest

from worker.batch import Drawn
from worker.params import Sampling
from worker.sampling import Draw, draw_tokens, uniform

Logits = npt.NDArray[np.float32]


def _rows(count: int, width: int = 50) -> Logits:
    return np.random.default_rng(7).normal(size=(count, width)).astype(np.float32)


def _at(sampling: Sampling, position: int, banned: frozenset[int] = frozenset()) -> Draw:
    return Draw(sampling, range(position), 0, banned)


def _ids(logits: Logits, draws: list[Draw], vocab_size: int) -> list[int | None]:
    drawn = draw_tokens(logits, draws, vocab_size=vocab_size)
    return [None if each is None else each.token_id for each in drawn]


def _everything(seed: int) -> Sampling:
    return Sampling(
        temperature=1.5,
        top_k=30,
        top_p=0.95,
        min_p=0.01,
        seed=seed,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={seed: 2.0},
        logprobs=3,
    )


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = np.zeros((1, 8), np.float32)
    logits[0, [3, 5]] = 1.0
    assert draw_tokens(logits, [_at(Sampling(), 0)], vocab_size=8) == [Drawn(3)]


def test_greedy_asks_no_filter() -> None:
    logits = _rows(1)
    narrow = Sampling(top_k=1, top_p=0.01, min_p=1.0)
    assert draw_tokens(logits, [_at(narrow, 0)], vocab_size=50) == [Drawn(int(logits.argmax()))]


def test_unfiltered_draws_are_pinned() -> None:
    """Sessions outlive releases: a seed promises its tokens."""
    logits = _rows(12)
    draws = [_at(Sampling(1.5, seed=row), 40 + row) for row in range(12)]
    assert _ids(logits, draws, 50) == [35, 0, 36, 37, 2, 36, 19, 46, 25, 4, 43, 33]


@pytest.mark.parametrize(
    "wide",
    [
        Sampling(1.5, seed=3, top_k=50),
        Sampling(1.5, seed=3, top_k=2**32 - 1),
        Sampling(1.5, seed=3, top_p=1.0 - 2**-53),
        Sampling(1.5, seed=3, min_p=1e-9),
        Sampling(1.5, seed=3, top_k=51, top_p=1.0 - 2**-53, min_p=1e-9),
    ],
)
def test_filters_that_keep_everything_change_no_token(wide: Sampling) -> None:
    logits = _rows(40)
    plain = [_at(Sampling(1.5, seed=3), row) for row in range(40)]
    assert _ids(logits, [_at(wide, row) for row in range(40)], 50) == _ids(logits, plain, 50)


def test_draws_read_rows_where_they_lie_and_leave_them_as_they_were() -> None:
    """A plan's buffer: rows of it in another order, strided, that whoever draws must not write."""
    buffer = np.random.default_rng(3).normal(size=(8, 96)).astype(np.float32)
    rows = [buffer[row, :60] for row in (5, 0, 3, 6, 1)]
    samplings = [
        Sampling(),
        Sampling(logprobs=5),
        _everything(4),
        Sampling(1.0, seed=2, top_p=0.9),
        Sampling(logit_bias={3: 100.0}),
    ]
    draws = [Draw(sampling, [7, 7, 9], 2, frozenset({1})) for sampling in samplings]
    draws[0] = _at(samplings[0], 3)
    expected = draw_tokens([row.copy() for row in rows], draws, vocab_size=55)
    before = buffer.copy()
    buffer.flags.writeable = False
    assert draw_tokens([buffer[row, :60] for row in (5, 0, 3, 6, 1)], draws, vocab_size=55) == expected
    assert buffer.tobytes() == before.tobytes()
    assert len({each.token_id for each in expected if each}) > 2


def test_a_greedy_draw_copies_no_row() -> None:
    """Nothing of a row's size is allocated."""
    rows = [np.random.default_rng(1).normal(size=200_000).astype(np.float32)]
    draws = [_at(Sampling(), 3)]
    draw_tokens(rows, draws, vocab_size=199_999)
    tracemalloc.start()
    try:
        draw_tokens(rows, draws, vocab_size=199_999)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20_000


def test_s20_a_draw_does_not_depend_on_its_batch() -> None:
    """Seeded beside unseeded, filtered beside plain, logs of all lengths: in any company and order."""
    random = np.random.default_rng(1)
    logits = _rows(16, width=64)
    draws = [
        Draw(
            _everything(row) if row % 2 else Sampling(1.5 * (row % 4 > 0), seed=row),
            random.integers(0, 64, 5 + 3 * row).tolist(),
            row,
            frozenset({row}) if row % 3 else frozenset(),
        )
        for row in range(16)
    ]
    alone = [draw_tokens(logits[row : row + 1], [draws[row]], vocab_size=60)[0] for row in range(len(draws))]
    assert len({drawn.token_id for drawn in alone if drawn}) > 6
    logits[11, 2] = np.nan
    alone[11] = None
    for _ in range(20):
        order = random.permutation(16)[: random.integers(1, 17)]
        together = draw_tokens(logits[order], [draws[row] for row in order], vocab_size=60)
        assert together == [alone[row] for row in order]


def test_s20_the_logits_and_the_log_are_only_read() -> None:
    logits = _rows(2)
    before = logits.copy()
    log = [4, 4, 9]
    draw_tokens(logits, [Draw(_everything(1), log, 2, frozenset({0}))] * 2, vocab_size=50)
    assert np.array_equal(logits, before)
    assert log == [4, 4, 9]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(2.0, seed=3), _everything(3)])
def test_s21_padding_of_the_vocabulary_is_never_drawn(sampling: Sampling) -> None:
    logits = np.zeros((1, 16), np.float32)
    logits[0, 10:] = [100.0, np.nan, np.inf, -np.inf, 0.0, 100.0]
    for position in range(200):
        (drawn,) = draw_tokens(logits, [_at(sampling, position)], vocab_size=10)
        assert drawn is not None
        assert drawn.token_id < 10
        assert all(each.token_id < 10 for each in drawn.top)


def test_s21_ids_beyond_the_vocabulary_have_no_effect() -> None:
    logits = _rows(1)
    odd = Sampling(1.0, seed=2, repetition_penalty=2.0, presence_penalty=1.0, logit_bias={10: 50.0, 99: 50.0})
    strange = Draw(odd, [10, 49, 50, 2**31, 99], 3, frozenset({10, 77}))
    assert _ids(logits, [strange], 10) == _ids(logits, [_at(Sampling(1.0, seed=2), 5)], 10)


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-30, 1e-9, 1e-4, float(np.float32(1e-4))])
def test_s22_a_tiny_temperature_equals_greedy(temperature: float) -> None:
    logits = np.concatenate([_rows(20), 3e38 * np.sign(_rows(20)), np.round(_rows(20))]).astype(np.float32)
    greedy = logits.argmax(axis=1).tolist()
    for top_k in (None, 7):
        draws = [_at(Sampling(temperature, seed=5, top_k=top_k), position) for position in range(60)]
        assert _ids(logits, draws, 50) == greedy


def test_s22_logits_of_any_size_do_not_overflow() -> None:
    logits = np.array([[3.4e38, -3.4e38, 3.3e38, 0.0]], np.float32)
    for temperature in (1.1e-4, 1.0, 3e38):
        sampling = Sampling(temperature, seed=1, repetition_penalty=1e-3, logprobs=4, min_p=0.1, top_p=0.9)
        assert _ids(logits, [Draw(sampling, [0], 0, frozenset({3}))], 4)[0] in (0, 2)


def test_s23_the_smallest_top_p_keeps_one_candidate() -> None:
    """Zero is refused at the edge; what is left never leaves a draw without candidates."""
    logits = np.zeros((1, 50), np.float32)
    draws = [_at(Sampling(1.0, seed=4, top_p=5e-324), position) for position in range(30)]
    assert {token_id for draw in draws for token_id in _ids(logits, [draw], 50)} == {0}


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=1), _everything(1)])
@pytest.mark.parametrize("column", [0, 23, 49])
def test_s17_a_broken_logit_is_told_for_its_row_alone(broken: float, sampling: Sampling, column: int) -> None:
    logits = _rows(3)
    whole = draw_tokens(logits, [_at(sampling, 9)] * 3, vocab_size=50)
    logits[1, column] = broken
    # Not even a ban hides it: the row's numbers can't be trusted.
    draws = [_at(sampling, 9), _at(sampling, 9, frozenset({column})), _at(sampling, 9)]
    assert draw_tokens(logits, draws, vocab_size=50) == [whole[0], None, whole[2]]
    assert draw_tokens(logits, [_at(sampling, 9)] * 3, vocab_size=50) == [whole[0], None, whole[2]]


def test_banned_ids_are_never_drawn() -> None:
    logits = np.zeros((1, 4), np.float32)
    logits[0, 2] = 30.0
    banned = frozenset({0, 2})
    loved = {2: 100.0}
    assert _ids(logits, [_at(Sampling(logit_bias=loved), 0, banned)], 4) == [1]
    for position in range(100):
        assert _ids(logits, [_at(Sampling(1.0, seed=1, top_k=3), position, banned)], 4)[0] in (1, 3)


def test_a_row_whose_ids_are_all_banned_draws_nothing() -> None:
    for sampling in (Sampling(), Sampling(1.0, seed=1), _everything(1)):
        assert _ids(_rows(1, 4), [_at(sampling, 3, frozenset(range(4)))], 4) == [None]


def test_bias_forces_and_excludes() -> None:
    logits = 5.0 * _rows(30)
    draws = [_at(Sampling(1.0, seed=6, logit_bias={17: 100.0}), position) for position in range(30)]
    assert _ids(logits, draws, 50) == [17] * 30
    flat = np.zeros((1, 3), np.float32)
    for position in range(100):
        draw = _at(Sampling(1.0, seed=6, logit_bias={1: -100.0}), position)
        assert _ids(flat, [draw], 3)[0] in (0, 2)


def test_no_logprobs_unless_asked_for() -> None:
    (drawn,) = draw_tokens(_rows(1), [_at(Sampling(1.0, seed=1), 0)], vocab_size=50)
    assert drawn is not None
    assert (drawn.logprob, drawn.top) == (None, ())


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = np.log(np.array([[0.1, 0.2, 0.5, 0.2, 123.0]])).astype(np.float32)
    sampling = Sampling(logit_bias={0: 100.0}, repetition_penalty=3.0, logprobs=3, temperature=0.3, top_k=1)
    (drawn,) = draw_tokens(logits, [Draw(sampling, [2, 2], 2, frozenset({1}))], vocab_size=4)
    assert drawn is not None
    assert drawn.token_id == 0
    assert drawn.logprob == pytest.approx(np.log(0.1), abs=1e-6)
    assert [each.token_id for each in drawn.top] == [2, 1, 3]
    assert [each.logprob for each in drawn.top] == pytest.approx(np.log([0.5, 0.2, 0.2]), abs=1e-6)


def test_logprobs_zero_tells_the_drawn_token_only() -> None:
    (drawn,) = draw_tokens(np.zeros((1, 8), np.float32), [_at(Sampling(logprobs=0), 0)], vocab_size=8)
    assert drawn is not None
    assert drawn.logprob == pytest.approx(-np.log(8))
    assert drawn.top == ()


def test_more_logprobs_than_ids_tell_all_ids() -> None:
    (drawn,) = draw_tokens(np.zeros((1, 8), np.float32), [_at(Sampling(logprobs=20), 0)], vocab_size=3)
    assert drawn is not None
    assert [each.token_id for each in drawn.top] == [0, 1, 2]


def test_rows_and_draws_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="zip"):
        draw_tokens(_rows(2), [_at(Sampling(), 0)], vocab_size=50)


def test_uniform_is_a_function_of_seed_stream_and_position() -> None:
    grid = [
        uniform(seed, stream, position) for seed in (0, 2**64 - 1) for stream in (0, 1) for position in (0, 9)
    ]
    assert len(set(grid)) == 8
    assert all(0.0 <= value < 1.0 for value in grid)
    # Pinned, since sessions outlive releases.
    assert uniform(1, 0, 0) == 0.3035680343067586
    assert uniform(2**64 - 1, 1, 77) == 0.1801589078361847
