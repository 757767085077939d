"""Pass: the merged gate and up projection and its gating become one launch."""

from torch import fx

from worker.plan.graph import StepGraph
from worker.plan.passes.matching import (
    ALIGNED_ROWS,
    GraphPass,
    calls,
    insert_call,
    is_call,
    is_constant,
    replace,
)


@GraphPass
def fuse_swiglu(step: StepGraph) -> None:
    """Turns `swiglu` of the two halves of `linear(x, w)` into `linear_swiglu(x, w)`.

    Given the same products exact; the intermediate value, twice as wide as the result, is never written.
    Nothing else may read the product or its halves, the first half must be the gate, and both must have a
    multiple of `ALIGNED_ROWS` columns: packed weights are cut between panels.
    """
    for swiglu in calls(step.graph, "swiglu"):
        gate, up = swiglu.args
        if not isinstance(gate, fx.Node) or not isinstance(up, fx.Node):
            continue
        if not (_is_private_columns(gate) and _is_private_columns(up)):
            continue
        product = gate.args[0]
        if not isinstance(product, fx.Node) or not is_call(product, "linear"):
            continue
        weight = product.args[1]
        if not isinstance(weight, fx.Node) or not is_constant(weight):
            continue
        rows = step.shape(str(weight.target))[0]
        half = rows // 2
        halves = gate.args == (product, 0, half) and up.args == (product, half, rows)
        if halves and rows % (2 * ALIGNED_ROWS) == 0 and product.users.keys() == {gate, up}:
            replace(swiglu, insert_call(swiglu, "linear_swiglu", *product.args))
            for node in (gate, up, product):
                step.graph.erase_node(node)


def _is_private_columns(value: fx.Node) -> bool:
    return is_call(value, "columns") and len(value.users) == 1
