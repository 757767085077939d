import torch

from tests.worker.numerics import bits
from tests.worker.plan.graphs import Maker, draw, listing, make_example, run_graph
from worker.plan.passes.fuse_add_rms_norm import fuse_add_rms_norm


def test_before_and_after():
    make = Maker()
    x, y = make.value("x"), make.value("y")
    norm = make.weight("norm", 24)
    total = make.call("add", x, y)
    normed = make.call("rms_norm", total, norm, 1e-5)
    step = make.done(make.call("add", total, normed))
    after = fuse_add_rms_norm(step)
    assert listing(step) == ["add(x, y)", "rms_norm(%0, norm, 1e-05)", "add(%0, %1)", "return(%2)"]
    assert listing(after) == [
        "add_rms_norm(x, y, norm, 1e-05)",
        "part(%0, 0)",
        "part(%0, 1)",
        "add(%1, %2)",
        "return(%3)",
    ]
    inputs = {"x": draw(5, 24), "y": draw(5, 24, seed=1)}
    assert torch.equal(bits(run_graph(after, inputs)), bits(run_graph(step, inputs)))


def test_the_sum_may_be_read_before_its_norm():
    make = Maker()
    x, y, norm = make.value("x"), make.value("y"), make.weight("norm", 24)
    total = make.call("add", x, y)
    twice = make.call("swiglu", total, total)
    step = make.done(make.call("swiglu", twice, make.call("rms_norm", total, norm, 1e-5)))
    after = fuse_add_rms_norm(step)
    after.graph.lint()
    assert listing(after)[3:] == ["swiglu(%1, %1)", "swiglu(%3, %2)", "return(%4)"]


def test_two_norms_of_one_sum_stay():
    make = Maker()
    x, y = make.value("x"), make.value("y")
    one, other = make.weight("one", 24), make.weight("other", 24)
    total = make.call("add", x, y)
    norms = [make.call("rms_norm", total, weight, 1e-5) for weight in (one, other)]
    step = make.done(make.call("add", *norms))
    assert str(fuse_add_rms_norm(step).graph) == str(step.graph)


def test_a_computed_weight_and_a_lone_norm_stay():
    make = Maker()
    x, y = make.value("x"), make.value("y")
    computed = make.call("add", x, y)
    step = make.done(make.call("rms_norm", make.call("add", x, y), computed, 1e-5))
    assert str(fuse_add_rms_norm(step).graph) == str(step.graph)
    make = Maker()
    step = make.done(make.call("rms_norm", make.value("x"), make.weight("norm", 24), 1e-5))
    assert str(fuse_add_rms_norm(step).graph) == str(step.graph)


def test_a_weight_behind_the_sum_stays():
    make = Maker()
    x, y = make.value("x"), make.value("y")
    total = make.call("add", x, y)
    step = make.done(make.call("rms_norm", total, make.weight("norm", 24), 1e-5))
    after = fuse_add_rms_norm(step)
    after.graph.lint()
    assert str(after.graph) == str(step.graph)


def test_it_is_exact_over_a_whole_step():
    example = make_example()
    fused = fuse_add_rms_norm(example.step)
    assert example.equal(fused, example.step)
    names = [line.partition("(")[0] for line in listing(fused)]
    # All norms follow a sum but that of the embedding.
    assert (names.count("add_rms_norm"), names.count("rms_norm"), names.count("add")) == (4, 1, 0)
