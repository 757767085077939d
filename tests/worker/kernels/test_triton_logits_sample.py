"""`logits_sample` under the interpreter, against `worker.sampling`; and its twin, which needs none."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.worker.kernels.child_process import TRITON_MARKS, run_module
from tests.worker.kernels.sample_cases import NOT_BANNED, any_draw, make_case
from worker.kernels.reference.logits_sample import logits_sample
from worker.params import Sampling
from worker.sampling import Draw, draw_tokens


@pytest.mark.parametrize(
    ("tasks", "printed"),
    [
        pytest.param("compare,invariance", ["40", "True"], marks=TRITON_MARKS),
        pytest.param("borders,numbers", ["31", "64", "200"], marks=TRITON_MARKS),
        pytest.param(
            "compare_long", ["182"], marks=[*TRITON_MARKS, pytest.mark.long, pytest.mark.timeout(1800)]
        ),
    ],
)
def test_draws_what_the_host_draws(tasks, printed):
    timeout_s = 1700 if tasks == "compare_long" else 280
    assert run_module("kernels.sample_child", tasks, timeout_s=timeout_s) == printed


@pytest.mark.parametrize("vocab_size", [1, 7, 129, 1000])
def test_the_twin_draws_what_the_host_draws(vocab_size):
    random = np.random.default_rng(vocab_size)
    count = 200
    logits = random.normal(scale=3.0, size=(count, vocab_size + 2)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[5, 0], logits[6, vocab_size] = np.nan, np.nan
    given = [any_draw(random, vocab_size) for _ in range(count)]
    case = make_case(torch.from_numpy(logits), given, vocab_size=vocab_size)
    arguments = case.arguments()
    ids, logprobs = logits_sample(*arguments, vocab_size=vocab_size)
    expected = draw_tokens(list(logits), given, vocab_size=vocab_size)
    assert ids.tolist() == [-1 if each is None else each.token_id for each in expected]
    assert torch.equal(arguments[3][:count], ids)
    for each, logprob in zip(expected, logprobs.tolist(), strict=True):
        if each is None or each.logprob is None:
            assert np.isnan(logprob)
        else:
            assert logprob == pytest.approx(each.logprob, abs=1e-5)


def test_the_twin_draws_nothing_for_a_row_without_flags():
    given = [Draw(replace(Sampling(1.0), seed=seed), [], 0, NOT_BANNED) for seed in range(2)]
    case = make_case(torch.zeros(2, 5), given, vocab_size=5)
    case.draws[1] = 0
    ids, _ = logits_sample(case.logits, case.draws, case.entries, case.fed, vocab_size=5)
    assert ids[1] == -1
    assert case.fed.tolist() == [ids[0], -7, -7]
