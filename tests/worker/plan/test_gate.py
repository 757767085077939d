"""The seed's contract: both plan modes agree bit for bit, and the gate sees every broken guard."""

import pytest
import torch

from tests.worker.numerics import make_kv
from worker.batch import Batch, DecodePlan, PlanAction
from worker.plan.decode_session import PagedDecodeSession
from worker.plan.gate import GateFailed, check_plan_parity, ragged_steps
from worker.plan.policy import PlanPolicy

NUM_STEPS = 24


@pytest.fixture
def steps(tiny_llama) -> list[Batch]:
    return ragged_steps(
        num_steps=NUM_STEPS,
        num_sessions=4,
        vocab_size=tiny_llama.config.vocab_size,
        block_size=16,
        num_blocks=64,
        seed=3,
    )


def test_steps_are_ragged(steps):
    sizes = [len(batch.rows) for batch in steps]
    lengths = [{len(row.token_ids) for row in batch.rows} for batch in steps]
    assert sizes[0] == sizes[-1] == 1
    assert max(sizes) == 4
    assert any(1 in some and max(some) > 1 for some in lengths), "no step mixes prefill and decode rows"
    assert any(
        row.position // 16 != row.context_len // 16 and len(row.token_ids) == 1
        for b in steps
        for row in b.rows
    ), "no decode row crosses a block border"


def test_modes_agree(steps, make_runner):
    report = check_plan_parity(make_runner(), make_runner(), steps)
    assert report.num_steps == NUM_STEPS
    assert report.num_logit_rows > NUM_STEPS
    assert report.launches_per_step == 4 + 14 * 2


@pytest.mark.parametrize("plan", [DecodePlan.PLAN_ONCE, DecodePlan.REPLAN])
def test_sees_an_ignored_flag(steps, make_runner, monkeypatch, plan):
    real = PlanPolicy.forward_paged_step_persistent
    monkeypatch.setattr(
        PlanPolicy,
        "forward_paged_step_persistent",
        lambda self, inputs, _plan, model, kv: real(self, inputs, plan, model, kv),
    )
    ignored = "REPLAN" if plan is DecodePlan.PLAN_ONCE else "PLAN_ONCE"
    with pytest.raises(GateFailed, match=rf"^{ignored}: \(builds, reuses, replans\)"):
        check_plan_parity(make_runner(), make_runner(), steps)


def test_sees_a_stuck_counter(steps, make_runner, monkeypatch):
    real = PlanPolicy.held_plan
    monkeypatch.setattr(
        PlanPolicy, "held_plan", lambda self, model, kv: (real(self, model, kv)[0], PlanAction.BUILT)
    )
    with pytest.raises(GateFailed, match=r"PLAN_ONCE.*\(1, 0, 0\)"):
        check_plan_parity(make_runner(), make_runner(), steps)


def test_sees_a_wrong_block(steps, make_runner, monkeypatch):
    real = PagedDecodeSession._write

    def keep_old_table(buffer, value):
        live = buffer[: value.shape[0]]
        return live if buffer.dim() == 2 and live.any() else real(buffer, value)

    monkeypatch.setattr(PagedDecodeSession, "_write", staticmethod(keep_old_table))
    with pytest.raises(GateFailed, match="logits differ"):
        check_plan_parity(make_runner(fill=0.0), make_runner(fill=0.0), steps)


def test_sees_a_stale_pool(steps, tiny_llama, make_runner, monkeypatch):
    class MovedPool:
        """The held arm, its pool moved to another allocation after half of the steps."""

        def __init__(self):
            self._runner = make_runner(fill=0.0)
            self._num_runs = 0

        def run(self, batch):
            if self._num_runs == NUM_STEPS // 2:
                moved = make_kv(tiny_llama)
                moved.data.copy_(self._runner._kv.data)
                self._runner._kv.data.fill_(1.0)
                self._runner._kv = moved
            self._num_runs += 1
            return self._runner.run(batch)

        def __getattr__(self, name):
            return getattr(self._runner, name)

    guarded = MovedPool()
    with pytest.raises(GateFailed, match=r"PLAN_ONCE.*\(2, 22, 0\)"):
        check_plan_parity(guarded, make_runner(fill=0.0), steps)
    assert guarded._runner._policy.rebuild_reasons == {"kv_allocation_id": 1}

    monkeypatch.setattr(PagedDecodeSession, "is_valid_for", lambda self, key: True)
    with pytest.raises(GateFailed, match=f"step {NUM_STEPS // 2}: logits differ"):
        check_plan_parity(MovedPool(), make_runner(fill=0.0), steps)


def test_sees_one_bit(steps, make_runner):
    class OneBitOff:
        def __init__(self):
            self._runner = make_runner()

        def run(self, batch):
            out = self._runner.run(batch)
            if len(out.logits):
                out.logits.view(torch.int32)[-1, -1] ^= 1
            return out

        def __getattr__(self, name):
            return getattr(self._runner, name)

    with pytest.raises(GateFailed, match="logits differ"):
        check_plan_parity(OneBitOff(), make_runner(), steps)
