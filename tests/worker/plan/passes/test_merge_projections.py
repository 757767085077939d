import pytest
import torch

from tests.worker.plan.graphs import Maker, draw, listing, make_example, run_graph
from worker.plan.passes.merge_projections import merge_projections


def test_before_and_after():
    make = Maker()
    x = make.value("x")
    weights = [make.weight(name, rows, 24) for name, rows in (("a", 32), ("b", 16), ("c", 48))]
    a, b, c = (make.call("linear", x, weight) for weight in weights)
    step = make.done(make.call("add", a, a), b, make.call("add", c, c))
    after = merge_projections(step)
    assert listing(step) == [
        "linear(x, a)",
        "linear(x, b)",
        "linear(x, c)",
        "add(%0, %0)",
        "add(%2, %2)",
        "return(('%3', '%1', '%4'))",
    ]
    assert listing(after) == [
        "linear(x, a+b+c)",
        "columns(%0, 0, 32)",
        "columns(%0, 32, 48)",
        "columns(%0, 48, 96)",
        "add(%1, %1)",
        "add(%3, %3)",
        "return(('%4', '%2', '%5'))",
    ]
    assert after.stacks == {"a+b+c": ("a", "b", "c")}
    inputs = {"x": draw(5, 24)}
    for got, expected in zip(run_graph(after, inputs), run_graph(step, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_values_are_merged_apart():
    step = merge_projections(make_example(num_layers=1).step)
    lines = listing(step)
    assert sum(line.startswith("linear") for line in lines) == 5
    assert list(step.stacks) == [
        "blk.0.attn_q.weight+blk.0.attn_k.weight+blk.0.attn_v.weight",
        "blk.0.ffn_gate.weight+blk.0.ffn_up.weight",
    ]


def test_a_projection_of_a_merged_projection():
    make = Maker()
    x = make.value("x")
    weights = [make.weight(name, 16, 16) for name in "abcd"]
    a, b = (make.call("linear", x, weight) for weight in weights[:2])
    c, d = (make.call("linear", a, weight) for weight in weights[2:])
    after = merge_projections(make.done(make.call("add", make.call("add", c, d), b)))
    after.graph.lint()
    assert listing(after) == [
        "linear(x, a+b)",
        "columns(%0, 0, 16)",
        "columns(%0, 16, 32)",
        "linear(%1, c+d)",
        "columns(%3, 0, 16)",
        "columns(%3, 16, 32)",
        "add(%4, %5)",
        "add(%6, %2)",
        "return(%7)",
    ]


@pytest.mark.parametrize("rows", [(32, 17), (8, 16), (1, 1)])
def test_rows_that_fill_no_panel_stay(rows):
    make = Maker()
    x = make.value("x")
    weights = [make.weight(name, count, 24) for name, count in zip("ab", rows, strict=True)]
    step = make.done(*(make.call("linear", x, weight) for weight in weights))
    assert str(merge_projections(step).graph) == str(step.graph)
    assert merge_projections(step).stacks == {}


def test_one_projection_stays():
    make = Maker()
    step = make.done(make.call("linear", make.value("x"), make.weight("a", 16, 24)))
    assert str(merge_projections(step).graph) == str(step.graph)


def test_projections_of_different_values_stay():
    make = Maker()
    x, y = make.value("x"), make.value("y")
    a, b = make.weight("a", 16, 24), make.weight("b", 16, 24)
    step = make.done(make.call("add", make.call("linear", x, a), make.call("linear", y, b)))
    assert str(merge_projections(step).graph) == str(step.graph)


def test_a_weight_that_something_else_reads_stays():
    make = Maker()
    x, tokens = make.value("x"), make.value("tokens")
    a, b = make.weight("a", 16, 16), make.weight("b", 16, 16)
    embedded = make.call("embedding", a, tokens)
    step = make.done(make.call("linear", x, a), make.call("linear", x, b), embedded)
    assert str(merge_projections(step).graph) == str(step.graph)


def test_a_weight_that_is_computed_stays():
    make = Maker()
    x, a = make.value("x"), make.weight("a", 16, 16)
    computed = make.call("add", make.weight("b", 16, 16), make.weight("c", 16, 16))
    step = make.done(make.call("linear", x, a), make.call("linear", x, computed))
    assert str(merge_projections(step).graph) == str(step.graph)
