"""Pass: several projections of one value become one product with their stacked weights."""

from collections import defaultdict
from itertools import accumulate, pairwise

from torch import fx

from worker.plan.graph import StepGraph
from worker.plan.passes.matching import ALIGNED_ROWS, GraphPass, calls, insert_call, is_constant


@GraphPass
def merge_projections(step: StepGraph) -> None:
    """Turns `linear(x, a), linear(x, b)` into `columns` of `linear(x, a + b)`: q, k, v and gate, up.

    One launch reads x once, and its N is large enough to share among threads. All projections of a value
    are merged or none: none if a part's rows are not aligned, or if a weight has other readers, for which
    it would have to be kept a second time. A product's columns do not depend on each other, but a library
    may round them differently for another N: plans that are compared bit for bit must both be merged or both
    not.
    """
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for linear in calls(step.graph, "linear"):
        x = linear.args[0]
        if isinstance(x, fx.Node):
            groups[x].append(linear)
    for linears in groups.values():
        weights = [weight for linear in linears if _is_free(weight := _weight(linear))]
        names = [str(weight.target) for weight in weights]
        rows = [step.shape(name)[0] for name in names]
        aligned = all(count % ALIGNED_ROWS == 0 for count in rows)
        if len(linears) > 1 and len(names) == len(linears) and aligned:
            _merge(step, linears, names, rows)


def _weight(linear: fx.Node) -> fx.Node:
    weight = linear.args[1]
    assert isinstance(weight, fx.Node)  # noqa: S101 - a linear takes two tensors
    return weight


def _is_free(weight: fx.Node) -> bool:
    return is_constant(weight) and len(weight.users) == 1


def _merge(step: StepGraph, linears: list[fx.Node], names: list[str], rows: list[int]) -> None:
    stack = "+".join(names)
    step.stacks[stack] = tuple(part for name in names for part in step.stacks.get(name, (name,)))
    first = linears[0]
    # Where a constant stands, so that constants stay together.
    with step.graph.inserting_before(_weight(first)):
        weight = step.graph.get_attr(stack)
    merged = insert_call(first, "linear", first.args[0], weight)
    parts = [
        insert_call(first, "columns", merged, start, end)
        for start, end in pairwise(accumulate(rows, initial=0))
    ]
    for linear, part in zip(linears, parts, strict=True):
        old_weight = _weight(linear)
        linear.replace_all_uses_with(part)
        step.graph.erase_node(linear)
        step.graph.erase_node(old_weight)
