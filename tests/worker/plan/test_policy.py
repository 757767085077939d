import gc
import resource
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from tests.worker.plan.plan_cases import BOTH_KERNELS, SHAPES, model_of, pool_of, row_of
from worker.batch import DecodePlan, PlanAction
from worker.plan.executor import kernels_named
from worker.plan.policy import MAX_HELD_PLANS, PlanPolicy
from worker.plan.rows import StepTooLarge


@pytest.fixture(params=BOTH_KERNELS)
def policy(request) -> PlanPolicy:
    return PlanPolicy(kernels=kernels_named(request.param), max_step_tokens=64, max_step_rows=16)


def test_s18_a_pool_rebuilt_under_a_held_plan_is_built_again_and_the_old_one_let_go(policy, tiny_llama):
    first, second = pool_of(tiny_llama), pool_of(tiny_llama)

    def run(kv, plan=DecodePlan.PLAN_ONCE):
        return policy.forward_paged_step_persistent([row_of("a")], plan, tiny_llama, kv)

    assert [run(kv).results[0].plan_action for kv in (first, first)] == [PlanAction.BUILT, PlanAction.REUSED]
    old_pool = weakref.ref(first)
    old_plan = weakref.ref(policy.held_plan(tiny_llama, first, policy.key(tiny_llama, first))[0])
    first.data.fill_(float("nan"))
    del first
    actions = [run(kv).results[0].plan_action for kv in (second, second)]
    assert actions == [PlanAction.BUILT, PlanAction.REUSED]
    assert policy.drop_reasons == {"kv_allocation_id": 1}
    assert policy.num_held == 1
    gc.collect()
    assert old_plan() is None
    assert old_pool() is None
    step = run(second, DecodePlan.REPLAN)
    assert step.results[0].plan_action is PlanAction.REPLANNED
    assert (policy.builds, policy.reuses, policy.replans) == (2, 2, 1)


def test_another_model_is_a_counted_reason_too(policy, tiny_llama, tmp_path):
    other = model_of(SHAPES["grouped"], tmp_path)
    kv = pool_of(tiny_llama)
    for model in (tiny_llama, other):
        policy.forward_paged_step_persistent([row_of("a")], DecodePlan.PLAN_ONCE, model, kv)
    assert policy.drop_reasons == {"model_instance_id": 1}
    assert policy.num_held == 1


def test_a_step_without_rows_is_refused_by_a_plan_that_ran_none(policy, tiny_llama):
    kv = pool_of(tiny_llama)
    policy.held_plan(tiny_llama, kv, policy.key(tiny_llama, kv))
    for plan in DecodePlan:
        with pytest.raises(ValueError, match="rows is empty"):
            policy.forward_paged_step_persistent((), plan, tiny_llama, kv)
    assert (policy.reuses, policy.replans) == (0, 0)


def test_a_replan_over_another_pool_leaves_the_held_plan_known_by_its_key(policy, tiny_llama):
    kv, other = pool_of(tiny_llama), pool_of(tiny_llama)
    for pool, plan in ((kv, DecodePlan.PLAN_ONCE), (other, DecodePlan.REPLAN), (kv, DecodePlan.PLAN_ONCE)):
        policy.forward_paged_step_persistent([row_of("a")], plan, tiny_llama, pool)
    key = policy.key(tiny_llama, kv)
    assert key is policy.held_plan(tiny_llama, kv, key)[0].key
    assert (policy.builds, policy.reuses, policy.replans) == (1, 1, 1)


def test_what_a_step_costs_is_told(policy, tiny_llama):
    kv = pool_of(tiny_llama)

    def run(*rows, plan=DecodePlan.PLAN_ONCE):
        return policy.forward_paged_step_persistent(rows, plan, tiny_llama, kv)

    run(row_of("a", 5), row_of("b", 3, blocks=(9,)))
    run(row_of("a", 1, 5), row_of("b", 1, 3, (9,)))
    told = run(row_of("b", 1, 4, (9,)), row_of("a", 1, 6))
    assert len(told.rows) == len(told.results) == 2
    step = told.results[0]
    assert step.batch_size == 2
    assert step.host_bytes == 2 * (4 + 4 + 8 + 4) + 2 * 4
    assert step.launches == 5 + 8 * tiny_llama.config.num_layers
    assert 0 < step.kernel_ns <= step.step_ns
    assert step.plan_ns > 0
    assert step.arena_bytes > 4 * tiny_llama.config.vocab_size
    fresh = run(row_of("a", 1, 7), plan=DecodePlan.REPLAN).results[0]
    assert (fresh.launches, fresh.arena_bytes) == (step.launches, step.arena_bytes)
    assert fresh.plan_ns > step.plan_ns


def test_replan_holds_nothing(policy, tiny_llama, monkeypatch):
    kv = pool_of(tiny_llama)
    for _ in range(3):
        policy.forward_paged_step_persistent([row_of("a")], DecodePlan.REPLAN, tiny_llama, kv)
    assert (policy.num_held, policy.builds, policy.replans) == (0, 0, 3)


def test_the_plan_unused_longest_goes_when_there_are_too_many(policy, tiny_llama):
    kv = pool_of(tiny_llama)
    base = policy.key(tiny_llama, kv)
    keys = [replace(base, max_step_tokens=16 + number) for number in range(MAX_HELD_PLANS + 2)]
    for key in keys[:MAX_HELD_PLANS]:
        assert policy.held_plan(tiny_llama, kv, key)[1] is PlanAction.BUILT
    assert policy.held_plan(tiny_llama, kv, keys[0])[1] is PlanAction.REUSED
    policy.held_plan(tiny_llama, kv, keys[MAX_HELD_PLANS])
    assert policy.num_held == MAX_HELD_PLANS
    assert policy.drop_reasons == {"least_recently_used": 1}
    assert policy.held_plan(tiny_llama, kv, keys[0])[1] is PlanAction.REUSED
    assert policy.held_plan(tiny_llama, kv, keys[1])[1] is PlanAction.BUILT


def test_a_refused_step_builds_nothing(policy, tiny_llama):
    kv = pool_of(tiny_llama)
    for plan in DecodePlan:
        with pytest.raises(StepTooLarge, match="tokens: wanted 65"):
            policy.forward_paged_step_persistent([row_of("a", 65)], plan, tiny_llama, kv)
    assert (policy.builds, policy.num_held, policy.replans) == (0, 0, 0)


def resident_bytes() -> int:
    """Of this process, what native code allocated included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_512_shapes_of_batches_are_one_plan_and_flat_memory(policy, tiny_llama):
    kv = pool_of(tiny_llama)
    shapes = [(rows, counts) for rows in range(1, 17) for counts in range(1, 33)]
    assert len(shapes) == 512

    def run(number):
        num_rows, last = shapes[number]
        rows = [row_of(f"s{number}-{row}", 1, 0, (row,)) for row in range(num_rows - 1)]
        rows.append(row_of(f"s{number}", last, 0, (40, 41), wants_logits=number % 3 > 0))
        return policy.forward_paged_step_persistent(rows, DecodePlan.PLAN_ONCE, tiny_llama, kv)

    sizes = []
    tracemalloc.start()
    try:
        for number in range(512):
            run(number)
            if number in (127, 511):
                gc.collect()
                sizes.append((tracemalloc.get_traced_memory()[0], resident_bytes()))
    finally:
        tracemalloc.stop()
    (early, early_resident), (late, late_resident) = sizes
    assert (policy.builds, policy.num_held, policy.reuses) == (1, 1, 511)
    assert late - early < 64 * 1024
    assert late_resident - early_resident < 8 * 2**20
