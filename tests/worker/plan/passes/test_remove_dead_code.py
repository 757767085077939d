from operator import getitem

from tests.worker.plan.graphs import Maker, constants, listing, make_example
from worker.plan.passes.remove_dead_code import remove_dead_code


def test_before_and_after():
    make = Maker()
    x, unused = make.value("x"), make.value("unused")
    norm, idle = make.weight("norm", 24), make.weight("idle", 16, 24)
    make.call("add", make.call("linear", unused, idle), make.call("linear", x, idle))
    fused = make.call("add_rms_norm", x, x, norm, 1e-5)
    make.graph.call_function(getitem, (fused, 0))
    step = make.done(make.graph.call_function(getitem, (fused, 1)))
    step.stacks["a+b"] = ("a", "b")
    after = remove_dead_code(step)
    assert listing(step)[:3] == ["linear(unused, idle)", "linear(x, idle)", "add(%0, %1)"]
    assert listing(after) == ["add_rms_norm(x, x, norm, 1e-05)", "part(%0, 1)", "return(%1)"]
    assert constants(after) == {"norm"}
    assert [node.target for node in after.graph.find_nodes(op="placeholder")] == ["x", "unused"]
    assert (step.stacks, after.stacks) == ({"a+b": ("a", "b")}, {})


def test_writing_operators_stay_with_what_they_read():
    make = Maker()
    names = ("q", "k", "v", "position", "slots")
    q, k, v, position, slots = (make.value(name) for name in names)
    cos, sin = make.weight("cos", 4, 8), make.weight("sin", 4, 8)
    caches = [make.weight(name, 4, 16, 2, 16) for name in ("keys", "values")]
    turned = make.call("rope", k, position, cos, sin)
    make.call("store_kv", turned, v, slots, *caches)
    make.call("rope_store", q, k, v, position, slots, cos, sin, *caches)
    step = make.done(q)
    assert str(remove_dead_code(step).graph) == str(step.graph)


def test_a_step_without_dead_code_stays():
    example = make_example()
    step = example.step
    assert str(remove_dead_code(step).graph) == str(step.graph)
    assert example.equal(remove_dead_code(step), step)
