import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.numerics import bits, make_kv
from tests.worker.plan.plan_cases import BOTH_KERNELS
from worker.batch import Batch, DecodePlan, PlanAction, Row
from worker.kv.storage import KvStorage
from worker.plan.rows import StepTooLarge
from worker.runner import RowsNotInvariant, Runner

BLOCKS = {"a": (9, 4, 30, 2), "b": (1, 17, 8, 40), "c": (11, 3, 63, 5)}
LOG = tuple((7 * index) % 250 + 3 for index in range(50))


def row(session="a", *, first=0, count=1, log=LOG, wants_logits=True, plan=DecodePlan.PLAN_ONCE) -> Row:
    return Row(session, log[first : first + count], first, BLOCKS[session], wants_logits, plan)


def run(runner: Runner, *rows: Row):
    return runner.run(Batch(rows))


@pytest.fixture(params=BOTH_KERNELS)
def make_arm(request, tiny_llama):
    """Makes runners over each kind of kernels, native ones with two threads."""

    def make(*, kv: KvStorage | None = None) -> Runner:
        return Runner(
            tiny_llama,
            make_kv(tiny_llama, fill=float("nan")) if kv is None else kv,
            kernels=request.param,
            max_step_tokens=128,
            max_step_rows=8,
            num_threads=2,
        )

    return make


@pytest.fixture
def alone(make_arm) -> torch.Tensor:
    """Bits of the logits at every position of LOG, decoded one by one with nobody beside it."""
    runner = make_arm()
    return bits(torch.cat([run(runner, row(first=first)).logits for first in range(len(LOG))]))


@pytest.mark.parametrize("plan", DecodePlan)
@pytest.mark.parametrize("chunk", [1, 5, 16, 23, 50])
def test_a_row_has_the_same_bits_in_any_chunks_and_company(make_arm, alone, chunk, plan):
    runner = make_arm()
    others = tuple(reversed(LOG))
    for number, first in enumerate(range(0, len(LOG), chunk)):
        count = min(chunk, len(LOG) - first)
        rows = [row(first=first, count=count, plan=plan), row("b", first=number, log=others, plan=plan)]
        if number % 2:
            rows = [row("c", count=40, log=others, plan=plan), *reversed(rows)]
        step = run(runner, *rows)
        place = [r.session_id for r in rows].index("a")
        assert torch.equal(bits(step.logits[place]), alone[first + count - 1]), f"token {first + count - 1}"


def test_logits_only_of_rows_that_want_them_in_batch_order(make_arm):
    rows = [row(name, count=5 + index) for index, name in enumerate("abc")]
    runner = make_arm()
    everything = run(runner, *rows).logits
    assert everything.shape[0] == 3
    turned = run(runner, *reversed(rows))
    assert torch.equal(bits(turned.logits), bits(everything.flip(0)))
    some = run(make_arm(), rows[2], rows[1]._replace(wants_logits=False), rows[0])
    assert torch.equal(bits(some.logits), bits(everything[[2, 0]]))
    assert [result.batch_size for result in some.results] == [3, 3, 3]
    none = run(make_arm(), row(count=20, wants_logits=False))
    assert none.rows == ()
    assert none.logits.shape[0] == 0
    assert len(none.results) == 1


def test_logits_are_views_that_the_next_run_overwrites(make_arm):
    runner = make_arm()
    first = run(runner, row())
    copy, (view,) = first.logits, first.rows
    assert view.base is not None
    np.testing.assert_array_equal(view, copy[0].numpy())
    run(runner, row(first=1))
    assert not np.array_equal(view, copy[0].numpy())


def test_rows_of_several_modes_are_refused(make_runner):
    runner = make_runner()
    rows = [row("a"), row("b", plan=DecodePlan.REPLAN)]
    with pytest.raises(ValueError, match="several plan modes"):
        run(runner, *rows)
    assert (runner.builds, runner.replans) == (0, 0)
    once, replan = (runner.run(turn) for turn in Batch(tuple(rows)).turns())
    assert once.results[0].plan_action is PlanAction.BUILT
    assert replan.results[0].plan_action is PlanAction.REPLANNED


def test_a_step_without_logits_stores_kv(make_arm, alone):
    runner = make_arm()
    run(runner, row(count=30, wants_logits=False))
    assert torch.equal(bits(run(runner, row(first=30)).logits[0]), alone[30])


def test_mode_may_change_at_any_token(make_arm, alone):
    runner = make_arm()
    for first in range(12):
        plan = DecodePlan.REPLAN if first % 3 == 1 else DecodePlan.PLAN_ONCE
        assert torch.equal(bits(run(runner, row(first=first, plan=plan)).logits[0]), alone[first])
    assert (runner.builds, runner.reuses, runner.replans) == (1, 7, 4)


def test_warm_up_leaves_the_pool_as_it_was_and_the_first_step_reuses(make_arm, tiny_llama):
    kv = make_kv(tiny_llama)
    kv.data.normal_(generator=torch.Generator().manual_seed(0))
    before = kv.data.clone()
    runner = make_arm(kv=kv)
    runner.warm_up()
    assert torch.equal(bits(kv.data), bits(before))
    assert (runner.builds, runner.reuses, runner.replans) == (1, 0, 0)
    step = run(runner, row())
    assert step.results[0].plan_action is PlanAction.REUSED
    result = step.results[0]
    assert result.launches == 5 + 8 * 2
    # Inputs of one token, where its row's slot begins and which token logits are of, a block table; one id.
    assert 20 + 4 <= result.host_bytes <= 20 + 3 * 4 + 4 * 4 + 4
    assert result.arena_bytes > 0
    assert 0 < result.kernel_ns <= result.step_ns


def test_warm_up_refuses_a_linear_whose_rows_see_each_other(make_runner, monkeypatch):
    def by_shape(x, weight):
        return x @ weight.T * (1.0 + 1e-6 * x.shape[0])

    monkeypatch.setattr("worker.kernels.reference.linear.linear", by_shape)
    runner = make_runner()
    with pytest.raises(RowsNotInvariant, match="linear"):
        runner.warm_up()
    assert runner.builds == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_ids": ()}, r"rows\[1\]\.token_ids is empty"),
        ({"token_ids": (1, 10**6)}, r"rows\[1\]\.token_ids holds an id outside"),
        ({"token_ids": (272,)}, r"rows\[1\]\.token_ids holds an id outside 0\.\.271"),
        ({"token_ids": (-1,)}, r"rows\[1\]\.token_ids holds an id outside"),
        ({"position": -1}, r"rows\[1\]\.position=-1"),
        ({"position": 16, "block_table": (4,)}, r"rows\[1\]\.block_table has 1 blocks, 2 are needed"),
        ({"block_table": (64,)}, r"rows\[1\]\.block_table holds a block outside 0\.\.63"),
        ({"block_table": (1, -1)}, r"rows\[1\]\.block_table holds a block outside 0\.\.63"),
        (
            {"token_ids": (3,), "block_table": range(10, 75)},
            r"rows\[1\]\.block_table has 65 blocks, 1 are needed, 64 at most",
        ),
        ({"block_table": BLOCKS["a"]}, r"rows\[1\]\.block_table: a slot would be written twice"),
        (
            {"token_ids": (3,) * 20, "block_table": (6, 6)},
            r"rows\[1\]\.block_table: a slot would be written twice",
        ),
    ],
)
def test_a_wrong_row_is_refused_and_changes_nothing(make_runner, tiny_llama, wrong, message):
    kv = make_kv(tiny_llama)
    runner = make_runner(kv=kv)
    with pytest.raises(ValueError, match=message):
        run(runner, row(), row("b")._replace(**wrong))
    assert not kv.data.any()
    assert (runner.builds, runner.reuses, runner.replans) == (0, 0, 0)


def test_an_oversized_batch_is_refused_with_numbers(make_runner):
    runner = make_runner()
    rows = tuple(Row(str(n), (1,), 0, (n,), True, DecodePlan.PLAN_ONCE) for n in range(9))
    for batch, message in (
        (Batch(rows), "rows: wanted 9, limit 8"),
        (
            Batch((Row("a", (1,) * 129, 0, tuple(range(9)), True, DecodePlan.PLAN_ONCE),)),
            "tokens: wanted 129, limit 128",
        ),
        (
            Batch((Row("a", (1,), 1024, tuple(range(64)), True, DecodePlan.PLAN_ONCE),)),
            "context_len: wanted 1025, limit 1024",
        ),
    ):
        with pytest.raises(StepTooLarge, match=message):
            runner.run(batch)
    assert runner.builds == 0


def test_a_pool_of_another_model_is_refused(tiny_llama):
    kv = make_kv(tiny_llama)
    kv.num_kv_heads += 1
    with pytest.raises(ValueError, match=r"kv\.num_kv_heads=3"):
        Runner(tiny_llama, kv, kernels="reference", max_step_tokens=8, max_step_rows=1)
    with pytest.raises(ValueError, match="max_step_rows=0"):
        Runner(tiny_llama, make_kv(tiny_llama), kernels="reference", max_step_tokens=8, max_step_rows=0)


def test_a_failing_build_counts_nothing_and_holds_nothing(make_runner, monkeypatch):
    runner = make_runner()
    with monkeypatch.context() as patch:
        patch.setattr("worker.plan.decode_session.lower", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(runner, row())
    assert runner.builds == 0
    assert run(runner, row()).results[0].plan_action is PlanAction.BUILT


CHILD = """
import sys
from pathlib import Path
import numpy, torch
from tests.tiny_model import write_tiny_gguf
from tests.worker.numerics import make_kv
from tests.worker.test_runner import row, run
from worker.kernels.triton import prepare_triton
from worker.model.llama import LlamaModel
from worker.model.weights.gguf import read_gguf
from worker.runner import Runner
kernels, path = sys.argv[1], Path(sys.argv[2])
if kernels == "triton":
    prepare_triton()
written = write_tiny_gguf(path / "tiny.gguf", seed=7, num_layers=1, num_heads=6)
model = LlamaModel.from_gguf(read_gguf(written))
runner = Runner(model, make_kv(model), kernels=kernels, max_step_tokens=24, max_step_rows=4)
runner.warm_up()
steps = ((row(count=20), row("b", count=3)), (row(first=20), row("c", count=7)))
numpy.save(path / "logits.npy", torch.cat([run(runner, *rows).logits for rows in steps]).numpy())
print("triton" in sys.modules)
"""


@pytest.mark.triton
@pytest.mark.skipif(find_spec("triton") is None, reason="the extra `triton` is not installed")
def test_triton_and_reference_agree_and_only_one_imports_triton(tmp_path):
    logits = {}
    for kernels, imported in (("reference", "False"), ("triton", "True")):
        path = tmp_path / kernels
        path.mkdir()
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", CHILD, kernels, str(path)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [imported]
        logits[kernels] = np.load(path / "logits.npy")
    assert logits["reference"].shape[0] == 4
    np.testing.assert_allclose(logits["triton"], logits["reference"], rtol=1e-4, atol=1e-5)
