"""The gate over plans of a device that delays, with plain torch in place of its kernels."""

import pytest
import torch

from tests.worker.plan.device_cases import DelayDevice, TwinLaunchers, device_runner
from tests.worker.plan.plan_cases import SHAPES, model_of, pool_of
from worker.batch import Batch, DecodePlan, Row, TokenClass
from worker.plan.gate import check_plan_parity, ragged_steps
from worker.plan.slots import Slots
from worker.runner import Runner


def steps_for(model, token_class=TokenClass.DECODE, *, block_size=16) -> list[Batch]:
    steps = ragged_steps(
        num_steps=18,
        num_sessions=7,
        vocab_size=model.config.vocab_size,
        block_size=block_size,
        num_blocks=128,
        seed=3,
    )
    return [Batch(tuple(row._replace(token_class=token_class) for row in batch.rows)) for batch in steps]


def reference_of(model) -> Runner:
    return Runner(
        model, pool_of(model, num_blocks=128), kernels="reference", max_step_tokens=150, max_step_rows=8
    )


@pytest.mark.parametrize("token_class", TokenClass)
@pytest.mark.parametrize("shape", SHAPES)
def test_plan_on_and_off_are_equal_in_each_class(monkeypatch, tmp_path, shape, token_class):
    sizes = SHAPES[shape]
    model = model_of(sizes, tmp_path)
    steps = steps_for(model, token_class, block_size=sizes.block_size)
    arms = [
        device_runner(
            monkeypatch,
            model,
            pool_of(model, block_size=sizes.block_size, num_blocks=128),
            launchers=TwinLaunchers(planes=2),
            max_step_tokens=150,
        )
        for _ in range(2)
    ]
    report = check_plan_parity(*arms, steps)
    assert report.num_logit_rows > 50
    assert report.launches_per_step == 5 + 8 * 2 + 2 + (4 if shape == "odd-widths" else 0)


@pytest.mark.parametrize(
    ("rounded", "planes", "tolerance"),
    [(torch.float32, 1, 1e-5), (torch.float32, 4, 1e-4), (torch.float16, 2, 2e-2), (torch.bfloat16, 1, 2e-1)],
)
def test_logits_are_those_of_the_reference(monkeypatch, tiny_llama, rounded, planes, tolerance):
    """Whatever dtypes and planes values are stored in; a narrow value has the bits of one rounded later."""
    device = DelayDevice()
    runner = device_runner(
        monkeypatch,
        tiny_llama,
        pool_of(tiny_llama, num_blocks=128),
        device,
        TwinLaunchers(rounded=rounded, planes=planes),
        max_step_tokens=150,
    )
    wide = TwinLaunchers(rounded=rounded, planes=planes)
    wide.product_dtype = wide.attention_dtype = lambda _of: torch.float32
    plain = device_runner(
        monkeypatch, tiny_llama, pool_of(tiny_llama, num_blocks=128), launchers=wide, max_step_tokens=150
    )
    reference = reference_of(tiny_llama)
    for batch in steps_for(tiny_llama):
        step, expected = runner.run(batch), reference.run(batch)
        torch.testing.assert_close(step.logits, expected.logits, rtol=0, atol=tolerance)
        assert torch.equal(step.logits, plain.run(batch).logits)
    assert device.num_replays > 5
    assert device.num_captures + device.num_replays == device.num_runs == 18


def test_sees_a_table_that_did_not_travel(monkeypatch, tiny_llama):
    real = Slots.update

    def update(self, slot, table):
        first, blocks = real(self, slot, table)
        return first, blocks[:0] if self._num_steps > 6 else blocks

    monkeypatch.setattr(Slots, "update", update)
    runner = device_runner(
        monkeypatch, tiny_llama, pool_of(tiny_llama, num_blocks=128, fill=0.0), max_step_tokens=150
    )
    reference = reference_of(tiny_llama)
    steps = [(runner.run(batch).logits, reference.run(batch).logits) for batch in steps_for(tiny_llama)]
    assert torch.allclose(*steps[0], rtol=0, atol=1e-4)
    assert not all(torch.allclose(*logits, rtol=0, atol=1e-4) for logits in steps)


def test_attention_is_cut_alike_whatever_the_pool_has_room_for(monkeypatch, tiny_llama):
    """Spans, and so bits, follow the model's longest context: workers with other pools must agree."""
    asked = set()

    class Recording(TwinLaunchers):
        def workspace_floats(self, *arguments, max_context_tokens, **named):
            asked.add(max_context_tokens)
            return super().workspace_floats(*arguments, max_context_tokens=max_context_tokens, **named)

        def _paged_attention(self, *arguments, max_context_tokens, **named):
            asked.add(max_context_tokens)
            super()._paged_attention(*arguments, max_context_tokens=max_context_tokens, **named)

    for num_blocks in (2, 128):
        pool = pool_of(tiny_llama, num_blocks=num_blocks)
        runner = device_runner(monkeypatch, tiny_llama, pool, launchers=Recording())
        runner.run(Batch((Row("s", (3, 4), 0, (1,), wants_logits=True, plan=DecodePlan.PLAN_ONCE),)))
    assert tiny_llama.config.max_context_tokens > 2 * 16
    assert asked == {tiny_llama.config.max_context_tokens}
