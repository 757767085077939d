"""`pagecast_native.Sampler`: beside the reference of its operator, over its own memory."""

import gc
import weakref

import numpy as np
import pagecast_native
import pytest
import torch

from tests.worker.kernels.sample_cases import NOT_BANNED, SampleCase, any_draw, make_case, rows_that_tie
from worker.kernels.draw_words import DRAW_WORDS, DRAWS, ENTRY_WORDS, FIRST_ENTRY, FLAGS, NUM_ENTRIES
from worker.kernels.reference.logits_sample import logits_sample
from worker.params import Sampling
from worker.sampling import Draw


def reference_of(case: SampleCase):
    return logits_sample(*case.arguments(), vocab_size=case.vocab_size)


def drawn_by(case: SampleCase, kernel_set):
    ids = np.full(len(case.draws), -9, np.int32)
    logprobs = np.full(len(case.draws), 9.0, np.float32)
    sampler = pagecast_native.Sampler(
        pagecast_native.Team(2),
        case.logits.numpy(),
        case.draws,
        ids,
        logprobs,
        vocab_size=case.vocab_size,
        kernel_set=kernel_set,
    )
    sampler.draw(len(ids), case.entries)
    return ids, logprobs


@pytest.mark.parametrize("vocab_size", [1, 7, 129, 1000])
@pytest.mark.parametrize("kernel_set", pagecast_native.kernel_sets())
def test_draws_what_the_reference_of_the_operator_draws(vocab_size, kernel_set):
    random = np.random.default_rng(vocab_size)
    logits = rows_that_tie(random, 200, vocab_size + 2)
    logits[5, 0], logits[6, vocab_size] = np.nan, np.nan
    given = [any_draw(random, vocab_size) for _ in range(200)]
    case = make_case(torch.from_numpy(logits), given, vocab_size=vocab_size)
    case.draws[11] = 0
    ids, logprobs = drawn_by(case, kernel_set)
    expected, their = reference_of(case)
    assert ids.tolist() == expected.tolist()
    assert ids[11] == -1
    np.testing.assert_allclose(logprobs, their.numpy(), rtol=1e-6, atol=1e-5)


def arguments(**changes):
    """Good ones of a `pagecast_native.Sampler` for two rows of 20."""
    return {
        "team": pagecast_native.Team(1),
        "logits": np.zeros((2, 20), np.float32),
        "draws": np.zeros((2, DRAW_WORDS), np.int32),
        "ids": np.full(2, -9, np.int32),
        "logprobs": np.zeros(2, np.float32),
        "vocab_size": 20,
        **changes,
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logits": np.zeros((2, 20))}, "^logits: must be float32"),
        ({"logits": np.zeros(20, np.float32)}, "^logits: must have two dimensions"),
        ({"logits": np.zeros((20, 2), np.float32).T}, "^logits: a row's floats"),
        ({"vocab_size": 21}, "^vocab_size: 21"),
        ({"vocab_size": 0}, "^vocab_size: 0"),
        ({"draws": np.zeros((2, 15), np.int32)}, "^draws: "),
        ({"draws": np.zeros((1, 16), np.int32)}, "^draws: fewer"),
        ({"draws": np.zeros((2, 16), np.int64)}, "^draws: must be int32"),
        ({"draws": np.zeros(33, np.int32)[1:].reshape(2, 16)}, "^draws: must start"),
        ({"ids": np.zeros(1, np.int32)}, "^ids: "),
        ({"ids": np.zeros(2, np.int64)}, "^ids: must be int32"),
        ({"logprobs": np.zeros(2)}, "^logprobs: must be float32"),
        ({"kernel_set": "mmx"}, 'kernel_set: "mmx"'),
    ],
)
def test_wrong_memory_is_refused(wrong, message):
    pagecast_native.Sampler(**arguments())
    with pytest.raises(ValueError, match=message):
        pagecast_native.Sampler(**arguments(**wrong))


def test_wrong_words_are_refused_and_nothing_is_drawn():
    given = arguments()
    sampler = pagecast_native.Sampler(**given)
    words = given["draws"]
    words[:, FLAGS] = DRAWS
    with pytest.raises(ValueError, match=r"^draws\[0\]: temperature"):
        sampler.draw(2)
    words[:, FLAGS] = 0
    with pytest.raises(ValueError, match=r"^num_rows: 3"):
        sampler.draw(3)
    assert make_case(torch.zeros(1, 20), [Draw(Sampling(), (), 0, NOT_BANNED)], vocab_size=20).draws[0].any()
    case = make_case(torch.zeros(2, 20), [Draw(Sampling(), (), 0, NOT_BANNED)] * 2, vocab_size=20)
    words[:] = case.draws.numpy()
    words[1, NUM_ENTRIES], words[1, FIRST_ENTRY] = 2, 1
    with pytest.raises(ValueError, match=r"^draws\[1\]: its entries"):
        sampler.draw(2, np.zeros((2, ENTRY_WORDS), np.int32))
    with pytest.raises(ValueError, match=r"^entries: must have two dimensions"):
        sampler.draw(2, np.zeros((2, 3), np.int32))
    negative = np.zeros((3, ENTRY_WORDS), np.int32)
    negative[2, 0] = -1
    with pytest.raises(ValueError, match=r"^entries\[2\]: token_id"):
        sampler.draw(2, negative)
    assert given["ids"].tolist() == [-9, -9]
    sampler.draw(2, np.zeros((3, ENTRY_WORDS), np.int32))
    assert given["ids"].tolist() == [0, 0]
    given["team"].close()
    with pytest.raises(RuntimeError, match="closed"):
        sampler.draw(2)


def test_a_sampler_keeps_its_memory_alive():
    given = arguments()
    held = [weakref.ref(given[name]) for name in ("logits", "draws", "ids", "logprobs")]
    sampler = pagecast_native.Sampler(**given)
    del given
    gc.collect()
    assert all(reference() is not None for reference in held)
    sampler.draw(2)
    del sampler
    gc.collect()
    assert all(reference() is None for reference in held)
