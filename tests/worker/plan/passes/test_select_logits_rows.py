import torch

from tests.worker.numerics import bits
from tests.worker.plan.graphs import Maker, draw, listing, make_example, run_graph
from worker.plan.passes.select_logits_rows import select_logits_rows


def test_before_and_after():
    make = Maker()
    x, y, index = make.value("x"), make.value("y"), make.value("index")
    norm, head = make.weight("norm", 24), make.weight("head", 40, 24)
    total = make.call("add", x, y)
    logits = make.call("linear", make.call("rms_norm", total, norm, 1e-5), head)
    step = make.done(make.call("select_rows", logits, index))
    after = select_logits_rows(step)
    assert listing(step) == [
        "add(x, y)",
        "rms_norm(%0, norm, 1e-05)",
        "linear(%1, head)",
        "select_rows(%2, index)",
        "return(%3)",
    ]
    assert listing(after) == [
        "add(x, y)",
        "select_rows(%0, index)",
        "rms_norm(%1, norm, 1e-05)",
        "linear(%2, head)",
        "return(%3)",
    ]
    inputs = {"x": draw(9, 24), "y": draw(9, 24, seed=1), "index": torch.tensor([8, 0, 3, 3])}
    assert torch.equal(bits(run_graph(after, inputs)), bits(run_graph(step, inputs)))


def test_it_is_exact_over_a_whole_step():
    example = make_example()
    assert example.equal(select_logits_rows(example.step), example.step)


def test_a_value_that_others_read_is_where_it_stops():
    make = Maker()
    x, index = make.value("x"), make.value("index")
    normed = make.call("rms_norm", x, make.weight("norm", 24), 1e-5)
    logits = make.call("linear", normed, make.weight("head", 40, 24))
    step = make.done(make.call("select_rows", logits, index), normed)
    assert listing(select_logits_rows(step))[:3] == [
        "rms_norm(x, norm, 1e-05)",
        "select_rows(%0, index)",
        "linear(%1, head)",
    ]
    make = Maker()
    x, index = make.value("x"), make.value("index")
    logits = make.call("linear", x, make.weight("head", 40, 24))
    step = make.done(make.call("select_rows", logits, index), logits)
    assert str(select_logits_rows(step).graph) == str(step.graph)


def test_a_computed_index_stays():
    make = Maker()
    x, index = make.value("x"), make.value("index")
    logits = make.call("linear", x, make.weight("head", 40, 24))
    step = make.done(make.call("select_rows", logits, make.call("add", index, index)))
    assert str(select_logits_rows(step).graph) == str(step.graph)


def test_an_index_behind_the_value_stays():
    make = Maker()
    normed = make.call("rms_norm", make.value("x"), make.weight("norm", 24), 1e-5)
    step = make.done(make.call("select_rows", normed, make.value("index")))
    after = select_logits_rows(step)
    after.graph.lint()
    assert str(after.graph) == str(step.graph)


def test_one_node_as_value_and_index_stays():
    for computed in (False, True):
        make = Maker()
        x = make.value("x")
        both = make.call("rms_norm", x, make.weight("norm", 24), 1e-5) if computed else x
        step = make.done(make.call("select_rows", both, both))
        assert str(select_logits_rows(step).graph) == str(step.graph)


def test_only_the_rows_of_the_first_value_are_dropped():
    make = Maker()
    x, index = make.value("x"), make.value("index")
    step = make.done(make.call("select_rows", make.call("linear", x, x), index))
    assert listing(select_logits_rows(step)) == ["select_rows(x, index)", "linear(%0, x)", "return(%1)"]


def test_operators_that_see_other_rows_stay():
    make = Maker()
    x, index = make.value("x"), make.value("index")
    step = make.done(make.call("select_rows", make.call("select_rows", x, index), index))
    assert str(select_logits_rows(step).graph) == str(step.graph)
