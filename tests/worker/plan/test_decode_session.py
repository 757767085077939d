import pytest
import torch

from tests.worker.numerics import bits, make_kv
from worker.batch import DecodePlan, PlanAction, Row
from worker.kernels.ops import implementations
from worker.plan.decode_session import PagedDecodeSession, PlanKey, StalePlan, StepTooLarge
from worker.plan.graph import StepGraph, StepInputs, trace
from worker.plan.policy import PlanPolicy
from worker.plan.program import lower
from worker.runner import step_inputs


def key_of(model, kv, **changes):
    limits = {"kernels": "reference", "max_step_tokens": 32, "max_step_rows": 2} | changes
    return PlanKey.of(model, kv, **limits)


def inputs_of(*token_ids: int, position: int = 0, blocks=(3, 5)) -> StepInputs:
    row = Row("s", token_ids, position, blocks, wants_logits=True, plan=DecodePlan.PLAN_ONCE)
    return step_inputs((row,), 16)


def test_graph_holds_operators_and_named_constants_only(tiny_llama):
    step = trace(tiny_llama, make_kv(tiny_llama))
    kinds = [node.op for node in step.graph.nodes]
    assert [n.name for n in step.graph.nodes if n.op == "placeholder"] == list(StepInputs._fields)
    assert set(kinds) == {"placeholder", "get_attr", "call_function", "output"}
    assert kinds.count("call_function") == 4 + 14 * tiny_llama.config.num_layers
    assert {"blk.1.ffn_down.weight", "rope.cos", "kv.0.keys", "kv.1.values"} <= step.constants.keys()


def test_program_runs_what_eager_runs(tiny_llama):
    kv, eager_kv = make_kv(tiny_llama, fill=float("nan")), make_kv(tiny_llama, fill=float("nan"))
    inputs = inputs_of(*range(20))
    plan = PagedDecodeSession(tiny_llama, kv, key_of(tiny_llama, kv))
    plan.bind(inputs, plan.key)
    logits = plan.run()
    assert torch.equal(bits(logits), bits(tiny_llama.forward_paged_step(*inputs, kv=eager_kv)))
    assert torch.equal(bits(kv.data), bits(eager_kv.data))
    assert kv.data[[3, 5]].isfinite().any()
    assert kv.data[[0, 1, 2, 4]].isnan().all()
    assert plan.realize_count == 1


def test_program_drops_results_at_their_last_use(tiny_llama):
    program = lower(trace(tiny_llama, make_kv(tiny_llama)), implementations("reference"))
    results = {launch.output for launch in program.launches}
    dropped = [slot for launch in program.launches for slot in launch.last_uses]
    assert sorted(dropped) == sorted(results - {program.output})
    for number, launch in enumerate(program.launches):
        later = {slot for other in program.launches[number + 1 :] for slot in other.arguments}
        assert not later & set(launch.last_uses)


def test_lower_refuses_unknown_operators(tiny_llama):
    step = trace(tiny_llama, make_kv(tiny_llama))
    some = dict(implementations("reference"))
    del some["pagecast.swiglu"]
    with pytest.raises(ValueError, match=r"pagecast\.swiglu"):
        lower(StepGraph(step.graph, step.constants), some)


def test_implementations_refuses_unknown_names():
    with pytest.raises(ValueError, match="cuda"):
        implementations("cuda")


@pytest.mark.parametrize("field", ["kv_allocation_id", "max_step_rows", "num_blocks"])
def test_stale_plan_refuses(tiny_llama, field):
    kv = make_kv(tiny_llama)
    plan = PagedDecodeSession(tiny_llama, kv, key_of(tiny_llama, kv))
    plan.bind(inputs_of(1), plan.key)
    other = {
        "kv_allocation_id": lambda: key_of(tiny_llama, make_kv(tiny_llama)),
        "max_step_rows": lambda: key_of(tiny_llama, kv, max_step_rows=3),
        "num_blocks": lambda: key_of(tiny_llama, make_kv(tiny_llama, num_blocks=65)),
    }[field]()
    assert not plan.is_valid_for(other)
    with pytest.raises(StalePlan, match=field):
        plan.bind(inputs_of(1), other)
    with pytest.raises(RuntimeError, match="without bind"):
        plan.run()
    assert plan.realize_count == 0
    with pytest.raises(StalePlan, match="kv_allocation_id"):
        PagedDecodeSession(tiny_llama, make_kv(tiny_llama), plan.key)


def test_bind_is_all_or_nothing(tiny_llama):
    kv = make_kv(tiny_llama)
    plan = PagedDecodeSession(tiny_llama, kv, key_of(tiny_llama, kv, max_step_tokens=4))
    with pytest.raises(StepTooLarge, match="token_ids: wanted 5, limit 4") as caught:
        plan.bind(inputs_of(1, 2, 3, 4, 5), plan.key)
    assert (caught.value.wanted, caught.value.limit) == (5, 4)
    with pytest.raises(RuntimeError, match="without bind"):
        plan.run()


def test_policy_rebuilds_for_another_pool_and_says_why(tiny_llama):
    policy = PlanPolicy(kernels="reference", max_step_tokens=32, max_step_rows=2)
    first, second = make_kv(tiny_llama), make_kv(tiny_llama)

    def run(kv, plan=DecodePlan.PLAN_ONCE):
        return policy.forward_paged_step_persistent(inputs_of(1), plan, tiny_llama, kv)

    actions = [run(kv).action for kv in (first, first, second, second)]
    assert actions == [PlanAction.BUILT, PlanAction.REUSED, PlanAction.BUILT, PlanAction.REUSED]
    assert policy.rebuild_reasons == {"kv_allocation_id": 1}
    step = run(second, DecodePlan.REPLAN)
    assert step.action is PlanAction.REPLANNED
    assert (policy.builds, policy.reuses, policy.replans) == (2, 2, 1)
    assert step.host_bytes == inputs_of(1).num_bytes + 4 * tiny_llama.config.vocab_size
    assert step.plan_ns > 0
    assert step.step_ns > 0
