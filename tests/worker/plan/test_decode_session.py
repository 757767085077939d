import gc
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.worker.plan.plan_cases import BOTH_KERNELS, eager_logits, pool_of, row_of
from worker.plan.decode_session import PagedDecodeSession, PlanKey, StalePlan
from worker.plan.executor import kernels_named
from worker.plan.rows import StepTooLarge


@pytest.fixture(params=BOTH_KERNELS)
def kernels(request):
    return kernels_named(request.param)


@pytest.fixture
def reference():
    return kernels_named("reference")


def key_of(model, kv, kernels, **changes) -> PlanKey:
    limits = {"max_step_tokens": 32, "max_step_rows": 2} | changes
    return PlanKey.of(model, kv, kernels=kernels.name, **limits)


def session_of(model, kv, kernels, **changes) -> PagedDecodeSession:
    return PagedDecodeSession(model, kv, key_of(model, kv, kernels, **changes), kernels)


def test_runs_what_eager_runs(tiny_llama, kernels):
    kv, eager_kv = pool_of(tiny_llama), pool_of(tiny_llama)
    plan = session_of(tiny_llama, kv, kernels)
    bound = plan.bind([row_of("a", 20)], plan.key)
    kernel_ns = plan.run()
    (logits,) = plan.logits_of(bound)
    expected = eager_logits(tiny_llama, eager_kv, [row_of("a", 20)])
    assert bound.places == (0,)
    torch.testing.assert_close(torch.from_numpy(logits)[None], expected, rtol=1e-4, atol=1e-4)
    assert kv.data[[3, 5]].isfinite().any()
    assert kv.data[[0, 1, 2, 4]].isnan().all()
    assert plan.realize_count == 1
    assert kernel_ns > 0


def test_logits_lie_in_the_plans_own_memory(tiny_llama, kernels):
    plan = session_of(tiny_llama, pool_of(tiny_llama), kernels)
    addresses = set()
    for position in range(3):
        bound = plan.bind([row_of("a", 1, position)], plan.key)
        plan.run()
        addresses.add(plan.logits_of(bound)[0].ctypes.data)
    assert len(addresses) == 1


def test_an_interrupt_leaves_no_logits_of_another_row(tiny_llama, reference):
    """Of a memory that runs out while views are picked, say; the next step asks for the same ones."""
    plan = session_of(tiny_llama, pool_of(tiny_llama), reference)
    one, other = row_of("a"), row_of("b", blocks=(9,))

    def trace(frame, event, _argument):
        nonlocal lines
        if frame.f_code.co_name != "logits_of":
            return None
        if event == "line":
            lines -= 1
            if lines < 0:
                raise MemoryError
        return trace

    for after_lines in range(4):
        first = plan.logits_of(plan.bind([one, other], plan.key))
        swapped = plan.bind([other, one], plan.key)
        lines = after_lines
        sys.settrace(trace)
        try:
            with pytest.raises(MemoryError):
                plan.logits_of(swapped)
        finally:
            sys.settrace(None)
        addresses = [row.ctypes.data for row in plan.logits_of(swapped)]
        assert addresses == [row.ctypes.data for row in reversed(first)]


def test_run_without_bind_is_refused(tiny_llama, kernels):
    plan = session_of(tiny_llama, pool_of(tiny_llama), kernels)
    with pytest.raises(RuntimeError, match="without bind"):
        plan.run()
    plan.bind([row_of("a")], plan.key)
    plan.run()
    with pytest.raises(RuntimeError, match="replays each binding once"):
        plan.run()
    assert plan.realize_count == 1


@pytest.mark.parametrize("field", ["kv_allocation_id", "max_step_rows", "num_blocks", "kernels", "dtype"])
def test_a_stale_plan_refuses_and_can_not_run(tiny_llama, reference, field):
    kv = pool_of(tiny_llama)
    plan = session_of(tiny_llama, kv, reference)
    plan.bind([row_of("a")], plan.key)
    other = {
        "kv_allocation_id": lambda: key_of(tiny_llama, pool_of(tiny_llama), reference),
        "max_step_rows": lambda: key_of(tiny_llama, kv, reference, max_step_rows=3),
        "num_blocks": lambda: replace(plan.key, num_blocks=65),
        "kernels": lambda: replace(plan.key, kernels="native/avx2/2"),
        "dtype": lambda: replace(plan.key, dtype=torch.float64),
    }[field]()
    assert not plan.is_valid_for(other)
    with pytest.raises(StalePlan, match=field) as caught:
        plan.bind([row_of("a")], other)
    assert caught.value.reasons == (field,)
    with pytest.raises(RuntimeError, match="without bind"):
        plan.run()
    assert plan.realize_count == 0


def test_a_plan_for_another_pool_is_not_built(tiny_llama, reference):
    key = key_of(tiny_llama, pool_of(tiny_llama), reference)
    with pytest.raises(StalePlan, match="kv_allocation_id"):
        PagedDecodeSession(tiny_llama, pool_of(tiny_llama), key, reference)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row_of("a", 33, blocks=(1, 2, 3))], "tokens: wanted 33, limit 32"),
        ([row_of("a"), row_of("b", blocks=(1,)), row_of("c", blocks=(2,))], "rows: wanted 3, limit 2"),
        ([row_of("a", 1, 1024, range(64))], "context_len: wanted 1025, limit 1024"),
        ([], "rows is empty"),
        ([row_of("b", blocks=(1,)), row_of("b", blocks=(2,))], r"rows\[1\]\.session_id='b'"),
        ([row_of("b", blocks=(1,)), row_of("a", blocks=(64,))], r"rows\[1\]\.block_table holds a block"),
        ([row_of("b", blocks=(1,)), row_of("a", 2, 15, blocks=(2,))], r"rows\[1\]\.block_table has 1"),
        ([row_of("b", blocks=(1,)), row_of("a", blocks=(1,))], "written twice"),
    ],
)
def test_a_refused_bind_leaves_slots_and_buffers_as_they_were(tiny_llama, reference, rows, message):
    plan = session_of(tiny_llama, pool_of(tiny_llama), reference)
    plan.bind([row_of("a", 5), row_of("z", 3, blocks=(9,))], plan.key)
    buffers = plan._buffers
    before = [tensor.clone() for tensor in buffers.inputs]
    slots = [buffers.slot(name) for name in "abcz"]
    with pytest.raises(ValueError, match=message) as caught:
        plan.bind(rows, plan.key)
    assert isinstance(caught.value, StepTooLarge) == ("limit" in message)
    assert all(torch.equal(a, b) for a, b in zip(before, buffers.inputs, strict=True))
    assert [buffers.slot(name) for name in "abcz"] == slots
    with pytest.raises(RuntimeError, match="without bind"):
        plan.run()


def test_a_row_has_its_bits_in_any_slot_beside_empty_ones(tiny_llama, kernels):
    kv, other_kv = pool_of(tiny_llama), pool_of(tiny_llama)
    plan = session_of(tiny_llama, kv, kernels, max_step_rows=8)
    alone = session_of(tiny_llama, other_kv, kernels, max_step_rows=1)
    plan.bind([row_of(name, 1, 0, (10 + i,)) for i, name in enumerate("bcdefgh")], plan.key)
    plan.run()
    for position in range(20):
        alone_bound = alone.bind([row_of("a", 1, position)], alone.key)
        alone.run()
        beside = [row_of("d", 1, 1 + position, (12, 20))] if position % 2 else []
        bound = plan.bind([row_of("a", 1, position), *beside], plan.key)
        assert plan._buffers.slot("a") == 7
        plan.run()
        np.testing.assert_array_equal(
            plan.logits_of(bound)[0].view(np.int32), alone.logits_of(alone_bound)[0].view(np.int32)
        )


def test_the_memory_of_a_plan_goes_with_it(tiny_llama, kernels):
    plan = session_of(tiny_llama, pool_of(tiny_llama), kernels)
    held = [weakref.ref(thing) for thing in (plan._executor, plan._executor._kv)]
    plan.bind([row_of("a")], plan.key)
    plan.run()
    del plan
    gc.collect()
    assert [ref() for ref in held] == [None, None]
