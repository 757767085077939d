import numpy as np

from worker.sampling import Draw, draw_tokens, uniform
from worker.session import Sampling


def _rows(count: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(count, 50)).astype(np.float32)


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = np.zeros((1, 8), np.float32)
    logits[0, [3, 5]] = 1.0
    assert draw_tokens(logits, [Draw(Sampling(0.0, 1), 0)], vocab_size=8) == [3]


def test_s20_a_draw_does_not_depend_on_its_batch() -> None:
    logits = _rows(9)
    draws = [
        Draw(Sampling(1.5, seed), position) for seed, position in zip(range(9), range(40, 49), strict=True)
    ]
    together = draw_tokens(logits, draws, vocab_size=50)
    order = [4, 0, 8, 2]
    assert draw_tokens(logits[order], [draws[row] for row in order], vocab_size=50) == [
        together[row] for row in order
    ]
    assert len(set(together)) > 3


def test_s21_padding_of_the_vocabulary_is_never_drawn() -> None:
    logits = np.zeros((1, 16), np.float32)
    logits[0, 10:] = 100.0
    for position in range(200):
        assert draw_tokens(logits, [Draw(Sampling(2.0, 3), position)], vocab_size=10)[0] < 10
    assert draw_tokens(logits, [Draw(Sampling(0.0, 3), 0)], vocab_size=10)[0] < 10


def test_s22_a_tiny_temperature_tends_to_greedy() -> None:
    logits = _rows(20)
    greedy = logits.argmax(axis=1).tolist()
    for temperature in (1e-30, 1e-9, 1e-4):
        draws = [Draw(Sampling(temperature, 5), position) for position in range(20)]
        assert draw_tokens(logits, draws, vocab_size=50) == greedy


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    logits = np.log(probabilities).astype(np.float32)[None]
    drawn = [draw_tokens(logits, [Draw(Sampling(1.0, 11), n)], vocab_size=4)[0] for n in range(4000)]
    shares = np.bincount(drawn, minlength=4) / 4000
    assert np.abs(shares - probabilities).max() < 0.03


def test_uniform_is_a_function_of_seed_stream_and_position() -> None:
    grid = [
        uniform(seed, stream, position) for seed in (0, 2**64 - 1) for stream in (0, 1) for position in (0, 9)
    ]
    assert len(set(grid)) == 8
    assert all(0.0 <= value < 1.0 for value in grid)
    # Pinned, since sessions outlive releases.
    assert uniform(1, 0, 0) == 0.3035680343067586
    assert uniform(2**64 - 1, 1, 77) == 0.1801589078361847
