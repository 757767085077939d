"""Pass: a residual addition and the norm of its sum become one launch."""

from operator import getitem

from worker.plan.graph import StepGraph
from worker.plan.passes.matching import GraphPass, calls, insert_call, is_call, is_constant, is_ready, replace


@GraphPass
def fuse_add_rms_norm(step: StepGraph) -> None:
    """Turns `s = add(x, y); n = rms_norm(s, w)` into `s, n = add_rms_norm(x, y, w)`.

    Exact: the same operations in one call, while the sum is at hand. The sum may have other users, the next
    addition is one; with two norms of one sum, or a weight that stands behind it, it stays as it is.
    """
    for add in calls(step.graph, "add"):
        norms = [user for user in add.users if is_call(user, "rms_norm")]
        if len(norms) != 1:
            continue
        (norm,) = norms
        if not is_constant(norm.args[1]) or not all(is_ready(argument, add) for argument in norm.args[1:]):
            continue
        fused = insert_call(add, "add_rms_norm", *add.args, *norm.args[1:])
        with step.graph.inserting_before(add):
            total = step.graph.call_function(getitem, (fused, 0))
            normed = step.graph.call_function(getitem, (fused, 1))
        replace(norm, normed)
        replace(add, total)
