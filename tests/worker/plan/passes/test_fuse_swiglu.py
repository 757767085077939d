import pytest
import torch

from tests.worker.numerics import bits
from tests.worker.plan.graphs import Maker, draw, listing, make_example, run_graph
from worker.plan.graph import StepGraph
from worker.plan.passes.fuse_swiglu import fuse_swiglu
from worker.plan.passes.merge_projections import merge_projections


def make_mlp(
    *,
    gate: tuple[int, int] = (0, 32),
    up: tuple[int, int] = (32, 64),
    rows: int = 64,
    read: str = "",
    computed_weight: bool = False,
) -> StepGraph:
    make = Maker()
    x = make.value("x")
    weight = make.weight("w", rows, 24)
    if computed_weight:
        weight = make.call("add", weight, weight)
    product = make.call("linear", x, weight)
    halves = {"gate": make.call("columns", product, *gate), "up": make.call("columns", product, *up)}
    result = make.call("swiglu", halves["gate"], halves["up"])
    others = {"product": product, **halves}
    return make.done(result, *([others[read]] if read else []))


def test_before_and_after():
    step = make_mlp()
    assert listing(step) == [
        "linear(x, w)",
        "columns(%0, 0, 32)",
        "columns(%0, 32, 64)",
        "swiglu(%1, %2)",
        "return(%3)",
    ]
    after = fuse_swiglu(step)
    assert listing(after) == ["linear_swiglu(x, w)", "return(%0)"]
    inputs = {"x": draw(5, 24)}
    assert torch.equal(bits(run_graph(after, inputs)), bits(run_graph(step, inputs)))


@pytest.mark.parametrize(
    "change",
    [
        {"gate": (32, 64), "up": (0, 32)},
        {"gate": (0, 32), "up": (0, 32)},
        {"gate": (16, 48)},
        {"rows": 80},
        {"rows": 65},
        {"gate": (0, 16), "up": (16, 32)},
        {"read": "product"},
        {"read": "gate"},
        {"read": "up"},
        {"computed_weight": True},
        {"rows": 24, "gate": (0, 12), "up": (12, 24)},
        {"rows": 80, "gate": (0, 40), "up": (40, 80)},
    ],
    ids=str,
)
def test_another_pattern_stays(change):
    step = make_mlp(**change)
    assert str(fuse_swiglu(step).graph) == str(step.graph)


def test_projections_that_are_not_merged_stay():
    step = make_example().step
    assert str(fuse_swiglu(step).graph) == str(step.graph)


def test_halves_of_two_products_stay():
    make = Maker()
    x = make.value("x")
    products = [make.call("linear", x, weight) for weight in [make.weight(name, 64, 24) for name in "ab"]]
    gate = make.call("columns", products[0], 0, 32)
    up = make.call("columns", products[1], 32, 64)
    step = make.done(make.call("swiglu", gate, up))
    assert str(fuse_swiglu(step).graph) == str(step.graph)


def test_given_equal_products_it_is_exact_over_a_whole_step():
    example = make_example()
    merged = merge_projections(example.step)
    fused = fuse_swiglu(merged)
    assert example.equal(fused, merged)
    assert sum(line.startswith("linear_swiglu") for line in listing(fused)) == 2
