"""Steps that draw: on host kernels, native or not, beside what `draw_tokens` makes of the same logits."""

from dataclasses import replace

import numpy as np
import pytest

from tests.worker.kernels.sample_cases import any_draw
from tests.worker.numerics import make_kv
from tests.worker.plan.plan_cases import BOTH_KERNELS
from tests.worker.test_runner import LOG, row, run
from worker.batch import Batch, DecodePlan
from worker.params import Sampling
from worker.runner import Runner
from worker.sampling import Draw, draw_tokens


@pytest.fixture(params=BOTH_KERNELS)
def make_arm(request, tiny_llama):
    """Makes runners over each kind of kernels, native ones with two threads."""

    def make(vocab_size: int | None = None) -> Runner:
        return Runner(
            tiny_llama,
            make_kv(tiny_llama),
            kernels=request.param,
            max_step_tokens=128,
            max_step_rows=8,
            num_threads=2,
            vocab_size=vocab_size,
        )

    return make


def drawn_from(step, draws: list[Draw], vocab_size: int):
    return draw_tokens([np.array(row) for row in step.rows], draws, vocab_size=vocab_size)


@pytest.mark.parametrize("plan", DecodePlan)
def test_launched_steps_draw_what_the_host_draws_from_their_logits(make_arm, plan):
    """Rows in another order than their slots, some without logits, and padding in the vocabulary."""
    random = np.random.default_rng(1)
    runner, other = make_arm(250), make_arm(250)
    orders = ("abc", "cab", "ba", "c")
    num_drawn = 0
    for first in range(24):
        order = orders[first % 4]
        rows = [
            row(name, first=first, wants_logits=name != "b" or first % 3 > 0, plan=plan) for name in order
        ]
        draws = [any_draw(random, 250) for each in rows if each.wants_logits]
        if draws and first % 5 == 0:
            draws[0] = draws[0]._replace(sampling=replace(draws[0].sampling, logprobs=4))
        step = runner.launch(Batch(tuple(rows)), draws).read()
        logits = run(other, *rows)
        expected = drawn_from(logits, draws, 250)
        assert len(step.drawn) == len(expected)
        for mine, host in zip(step.drawn, expected, strict=True):
            assert (mine is None) == (host is None)
            if mine and host:
                assert mine.token_id == host.token_id < 250
                assert mine.top == host.top
                assert mine.logprob == (host.logprob and pytest.approx(host.logprob, abs=1e-5, rel=1e-6))
                num_drawn += 1
        assert len(step.results) == len(rows)
        assert step.sample_ns > 0
    assert num_drawn > 35


def test_as_many_draws_as_rows_that_want_logits(make_arm):
    runner = make_arm()
    rows = (row("a"), row("b", wants_logits=False), row("c"))
    draw = Draw(Sampling(), LOG[:1], 0, frozenset())
    for draws in ([], [draw], [draw] * 3):
        with pytest.raises(ValueError, match=f"draws has {len(draws)}, the step has 2 rows"):
            runner.launch(Batch(rows), draws)
    assert runner.reuses == 0
    step = runner.launch(Batch(rows), [draw, draw]).read()
    assert [each.token_id for each in step.drawn] == run(runner, *rows).logits.argmax(dim=1).tolist()


def test_the_words_of_a_draw_count_as_bytes_to_the_program(make_arm):
    runner = make_arm()
    sampling = Sampling(1.0, seed=2)
    written = []
    for first in range(4):
        draw = Draw(sampling, LOG[: first + 1], 0, frozenset())
        (with_draw,) = runner.launch(Batch((row(first=first),)), [draw]).read().results
        (without,) = run(runner, row(first=first)).results
        written.append(with_draw.host_bytes - without.host_bytes)
    is_native = runner._kernels == "native"
    assert written[2:] == ([4, 4] if is_native else [0, 0])
