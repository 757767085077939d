"""Pass: several projections of one value become one product with their stacked weights."""

from collections import defaultdict
from itertools import accumulate, pairwise

from torch import fx

from worker.plan.graph import StepGraph
from worker.plan.passes.matching import GraphPass, calls, insert_call, is_constant

ALIGNED_ROWS = 16
"""Every part has a multiple of so many rows: its columns of the product then start on a cache line, and its
rows fill whole panels of a packed weight."""


@GraphPass
def merge_projections(step: StepGraph) -> None:
    """Turns `linear(x, a), linear(x, b)` into `columns` of `linear(x, a + b)`: q, k, v and gate, up.

    One launch reads x once, and its N is large enough to share among threads. All projections of a value
    are merged or none: none if a part's rows are not aligned, if widths differ, or if a weight has other
    readers, for which it would have to be kept a second time. A product's columns do not depend on each
    other, but a library may round them differently for another N: plans that are compared bit for bit must
    both be merged or both not.
    """
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for linear in calls(step.graph, "linear"):
        x = linear.args[0]
        if isinstance(x, fx.Node):
            groups[x].append(linear)
    for linears in groups.values():
        weights = [linear.args[1] for linear in linears]
        names = [str(weight.target) for weight in weights if isinstance(weight, fx.Node) and _is_free(weight)]
        shapes = [step.shape(name) for name in names]
        aligned = all(rows % ALIGNED_ROWS == 0 for rows, *_ in shapes)
        if len(linears) > 1 and len(names) == len(linears) and aligned and len({s[1:] for s in shapes}) == 1:
            _merge(step, linears, names, [rows for rows, *_ in shapes])


def _is_free(weight: fx.Node) -> bool:
    return is_constant(weight) and len(weight.users) == 1


def _merge(step: StepGraph, linears: list[fx.Node], names: list[str], rows: list[int]) -> None:
    stack = "+".join(names)
    step.stacks[stack] = tuple(part for name in names for part in step.stacks.get(name, (name,)))
    first = linears[0]
    # Constants stand before all calls.
    with step.graph.inserting_before(first.all_input_nodes[1]):
        weight = step.graph.get_attr(stack)
    merged = insert_call(first, "linear", first.args[0], weight)
    parts = [
        insert_call(first, "columns", merged, start, end)
        for start, end in pairwise(accumulate(rows, initial=0))
    ]
    for linear, part in zip(linears, parts, strict=True):
        old_weight = linear.all_input_nodes[1]
        linear.replace_all_uses_with(part)
        step.graph.erase_node(linear)
        step.graph.erase_node(old_weight)
