"""Pass: what nobody reads is dropped."""

from worker.kernels import ops
from worker.plan.graph import StepGraph, operator_name
from worker.plan.passes.matching import GraphPass


@GraphPass
def remove_dead_code(step: StepGraph) -> None:
    """Drops calls and constants without users, back to front, and stacks that no constant names.

    Inputs stay, used or not: they are the step's signature. Operators that write caches stay: their effect
    is no value.
    """
    for node in reversed(step.graph.nodes):
        if not node.users and node.op in ("call_function", "get_attr"):
            name = operator_name(node)
            if name is not None and ops.writes(name):
                continue
            step.graph.erase_node(node)
    named = {node.target for node in step.graph.find_nodes(op="get_attr")}
    for stack in step.stacks.keys() - named:
        del step.stacks[stack]
