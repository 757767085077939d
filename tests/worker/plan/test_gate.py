"""The gate: both plan modes agree bit for bit, and it sees every broken guard, whatever runs the plans."""

from itertools import pairwise

import numpy as np
import pytest

from tests.worker.plan.plan_cases import BOTH_KERNELS, SHAPES, model_of, pool_of, row_of
from worker.batch import Batch, DecodePlan, PlanAction
from worker.model.llama import LlamaModel
from worker.plan.buffers import StepBuffers
from worker.plan.decode_session import PagedDecodeSession
from worker.plan.gate import GateFailed, check_plan_parity, ragged_steps
from worker.plan.policy import PlanPolicy
from worker.runner import Runner

NUM_STEPS = 18
NUM_SESSIONS = 5
LAUNCHES = 5 + 8 * 2


def steps_for(model: LlamaModel, *, num_steps=NUM_STEPS, num_sessions=NUM_SESSIONS, block_size=16):
    return ragged_steps(
        num_steps=num_steps,
        num_sessions=num_sessions,
        vocab_size=model.config.vocab_size,
        block_size=block_size,
        num_blocks=128,
        seed=3,
    )


def runner_of(
    model: LlamaModel, kernels: str, *, block_size=16, fill=float("nan"), num_threads=1, max_step_tokens=400
) -> Runner:
    return Runner(
        model,
        pool_of(model, block_size=block_size, num_blocks=128, fill=fill),
        kernels=kernels,
        max_step_tokens=max_step_tokens,
        max_step_rows=16,
        num_threads=num_threads,
    )


@pytest.fixture
def steps(tiny_llama) -> list[Batch]:
    return steps_for(tiny_llama)


@pytest.fixture(params=BOTH_KERNELS)
def arm(request, tiny_llama):
    """Makes fresh runners of one arm."""
    return lambda **changes: runner_of(tiny_llama, request.param, **changes)


@pytest.mark.parametrize(("num_steps", "num_sessions"), [(18, 5), (24, 4), (48, 16), (24, 16)])
def test_steps_are_ragged(tiny_llama, num_steps, num_sessions):
    steps = steps_for(tiny_llama, num_steps=num_steps, num_sessions=num_sessions)
    sizes = [len(batch.rows) for batch in steps]
    lengths = [{len(row.token_ids) for row in batch.rows} for batch in steps]
    assert len(steps) == num_steps
    assert sizes[0] == sizes[-1] == 1
    assert max(sizes) == num_sessions
    assert any(1 in some and max(some) > 1 for some in lengths), "no step mixes prefill and decode rows"
    assert any(
        row.position // 16 != row.context_len // 16 and len(row.token_ids) == 1
        for b in steps
        for row in b.rows
    ), "no decode row crosses a block border"


def test_too_few_steps_are_refused(tiny_llama):
    with pytest.raises(ValueError, match="num_steps=11"):
        steps_for(tiny_llama, num_steps=11)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"prompt_tokens=\(3, 0\)"):
        ragged_steps(
            num_steps=12,
            num_sessions=2,
            vocab_size=8,
            block_size=16,
            num_blocks=8,
            seed=0,
            prompt_tokens=(3, 0),
        )


@pytest.mark.parametrize("kernels", BOTH_KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_s19_plan_on_and_off_are_equal_across_every_border(kernels, shape, tmp_path):
    """Of blocks, of chunks, of rows and tokens up to what plans have room for; for every shape of model."""
    sizes = SHAPES[shape]
    model = model_of(sizes, tmp_path)
    steps = steps_for(model, num_steps=24, num_sessions=16, block_size=sizes.block_size)
    assert {1, 16} <= {len(batch.rows) for batch in steps}
    most = max(sum(len(row.token_ids) for row in batch.rows) for batch in steps)
    arms = [
        runner_of(model, kernels, block_size=sizes.block_size, num_threads=2, max_step_tokens=most)
        for _ in range(2)
    ]
    report = check_plan_parity(*arms, steps)
    assert report.num_steps == 24
    assert report.num_logit_rows > 100
    # Gate and up of 72 rows stay apart: linear, linear, swiglu for one launch.
    assert report.launches_per_step == LAUNCHES + (4 if shape == "odd-widths" else 0)


@pytest.mark.parametrize("kernels", BOTH_KERNELS)
def test_s19_plan_on_and_off_are_equal_to_the_end_of_the_context(tiny_llama, kernels):
    """Up to the last token of the last block that a block table has room for."""
    end = tiny_llama.config.max_context_tokens
    blocks = tuple(range(100, 100 - end // 16, -1))
    chunks = [*range(0, end - 24, 250), *range(end - 24, end + 1)]
    steps = [Batch((row_of("a", last - first, first, blocks),)) for first, last in pairwise(chunks)]
    assert steps[-1].rows[0].context_len == end
    arms = [runner_of(tiny_llama, kernels, max_step_tokens=250, num_threads=2) for _ in range(2)]
    assert check_plan_parity(*arms, steps).num_logit_rows == len(steps)


SPAN = 64
"""Tokens of a span: where there are several, native threads share one row's attention."""


def long_steps(model: LlamaModel) -> list[Batch]:
    return ragged_steps(
        num_steps=40,
        num_sessions=4,
        vocab_size=model.config.vocab_size,
        block_size=16,
        num_blocks=128,
        seed=3,
        prompt_tokens=(50, 190, 118, 150),
    )


def test_long_steps_decode_over_the_borders_of_spans(tiny_llama):
    rows = [row for batch in long_steps(tiny_llama) for row in batch.rows]
    decoded = {row.position for row in rows if len(row.token_ids) == 1}
    assert {SPAN - 1, SPAN, 2 * SPAN - 1, 2 * SPAN} <= decoded
    assert max(row.context_len for row in rows) > 3 * SPAN
    assert sum(len(row.token_ids) > 1 and row.context_len > 130 for row in rows) >= 4


@pytest.mark.parametrize("kernels", BOTH_KERNELS)
def test_s19_plan_on_and_off_are_equal_where_rows_are_shared_among_threads(tiny_llama, kernels):
    """Contexts of several spans, and decode rows that cross from one to the next."""
    arms = [runner_of(tiny_llama, kernels, num_threads=2) for _ in range(2)]
    assert check_plan_parity(*arms, long_steps(tiny_llama)).num_steps == 40


@pytest.mark.parametrize("plan", [DecodePlan.PLAN_ONCE, DecodePlan.REPLAN])
def test_sees_an_ignored_flag(steps, arm, monkeypatch, plan):
    real = PlanPolicy.forward_paged_step_persistent
    monkeypatch.setattr(
        PlanPolicy,
        "forward_paged_step_persistent",
        lambda self, rows, _plan, model, kv: real(self, rows, plan, model, kv),
    )
    ignored = "REPLAN" if plan is DecodePlan.PLAN_ONCE else "PLAN_ONCE"
    with pytest.raises(GateFailed, match=rf"^{ignored}: \(builds, reuses, replans\)"):
        check_plan_parity(arm(), arm(), steps)


def test_sees_a_stuck_counter(steps, arm, monkeypatch):
    monkeypatch.setattr(
        PlanPolicy, "reuses", property(lambda self: 0, lambda self, value: None), raising=False
    )
    with pytest.raises(GateFailed, match=r"PLAN_ONCE.*\(1, 0, 0\)"):
        check_plan_parity(arm(), arm(), steps)


def test_sees_a_wrong_block(steps, arm, monkeypatch):
    real = StepBuffers._write_table
    seen: set[tuple[int, int]] = set()

    def once(self, table, slot):
        known = (id(self), slot) in seen
        seen.add((id(self), slot))
        return True if known else real(self, table, slot)

    monkeypatch.setattr(StepBuffers, "_write_table", once)
    with pytest.raises(GateFailed, match="logits differ"):
        check_plan_parity(arm(fill=0.0), arm(fill=0.0), steps)


def swapped_logits(monkeypatch):
    real = StepBuffers.bind

    def bind(self, rows):
        bound = real(self, rows)
        return bound._replace(places=bound.places[::-1]) if self._num_layouts > 8 else bound

    monkeypatch.setattr(StepBuffers, "bind", bind)


def shared_slot(monkeypatch):
    real = StepBuffers._seat

    def seat(self, session_ids):
        real(self, session_ids)
        if self._num_layouts > 8 and len(session_ids) > 1:
            self._slots[session_ids[0]] = self._slots[session_ids[1]]

    monkeypatch.setattr(StepBuffers, "_seat", seat)


def tables_of_other_slots(monkeypatch):
    real = StepBuffers._write_table

    def write(self, table, slot):
        return real(self, table, slot ^ 1 if self._num_layouts > 8 else slot)

    monkeypatch.setattr(StepBuffers, "_write_table", write)


@pytest.mark.parametrize("broken", [swapped_logits, shared_slot, tables_of_other_slots])
def test_sees_a_wrong_slot(steps, arm, monkeypatch, broken):
    broken(monkeypatch)
    # Native programs refuse a layout that contradicts itself before they compute anything.
    with pytest.raises((GateFailed, ValueError), match=r"logits differ|query_start: ends at"):
        check_plan_parity(arm(fill=0.0), arm(fill=0.0), steps)


class Moved:
    """The held arm, its pool moved to another allocation after half of the steps."""

    def __init__(self, runner: Runner, model: LlamaModel) -> None:
        self.runner, self._model, self._num_runs = runner, model, 0

    def run(self, batch):
        if self._num_runs == NUM_STEPS // 2:
            moved = pool_of(self._model, num_blocks=128)
            moved.data.copy_(self.runner._kv.data)
            self.runner._kv.data.fill_(1.0)
            self.runner._kv = moved
        self._num_runs += 1
        return self.runner.run(batch)

    def __getattr__(self, name):
        return getattr(self.runner, name)


def test_s18_a_pool_rebuilt_under_a_held_plan_is_a_build_more_and_never_wrong(steps, arm, tiny_llama):
    moved = Moved(arm(fill=0.0), tiny_llama)
    with pytest.raises(GateFailed, match=rf"PLAN_ONCE.*\(2, {NUM_STEPS - 2}, 0\)"):
        check_plan_parity(moved, arm(fill=0.0), steps)
    assert moved.runner._policy.drop_reasons == {"kv_allocation_id": 1}
    assert moved.runner._policy.num_held == 1


def test_sees_a_stale_pool(steps, arm, tiny_llama, monkeypatch):
    monkeypatch.setattr(PagedDecodeSession, "is_valid_for", lambda self, key: True)
    held = PlanPolicy.held_plan
    first: dict[int, object] = {}

    def keep_first(self, model, kv, key):
        plan = first.setdefault(id(self), held(self, model, kv, key)[0])
        return plan, PlanAction.REUSED if plan.realize_count else PlanAction.BUILT

    monkeypatch.setattr(PlanPolicy, "held_plan", keep_first)
    with pytest.raises(GateFailed, match=f"step {NUM_STEPS // 2}: logits differ"):
        check_plan_parity(Moved(arm(fill=0.0), tiny_llama), arm(fill=0.0), steps)


def test_sees_other_launches(steps, arm, monkeypatch):
    once, replan = arm(), arm()
    with monkeypatch.context() as patch:
        patch.setattr("worker.plan.decode_session.optimise", lambda step: step)
        once.warm_up()
    with pytest.raises(GateFailed, match="launches per step are"):
        check_plan_parity(once, replan, steps)


class OneBitOff:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, batch):
        out = self._runner.run(batch)
        if out.rows:
            out.rows[-1].view(np.int32)[-1] ^= 1
        return out

    def __getattr__(self, name):
        return getattr(self._runner, name)


def test_sees_one_bit(steps, arm):
    with pytest.raises(GateFailed, match="logits differ"):
        check_plan_parity(OneBitOff(arm()), arm(), steps)
