"""What passes share: their form, and small questions and edits on graphs. Knows no single pass."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx
from torch.fx.node import Argument

from worker.kernels import ops
from worker.plan.graph import StepGraph

ALIGNED_ROWS = 16
"""Parts of a merged weight have a multiple of so many rows: their columns of the product then start on a
cache line, and their rows fill whole panels of a packed weight."""


@dataclass(frozen=True, slots=True)
class GraphPass:
    """A rewrite of a step; called, it leaves its argument as it is and returns a rewritten copy.

    Where the rewrite finds nothing that it is made for it changes nothing, whatever else the operators'
    arguments are; applied again it does nothing.
    Shapes noted at nodes are not kept up to date: infer them after the last pass.

    Attributes:
        rewrite: Edits a step in place: for whoever owns the graph and saves a copy.
    """

    rewrite: Callable[[StepGraph], None]

    @property
    def name(self) -> str:
        """Of the rewriting function."""
        return self.rewrite.__name__

    def __call__(self, step: StepGraph) -> StepGraph:
        """Rewrites a copy of `step`."""
        copy = step.copy()
        self.rewrite(copy)
        return copy


def calls(graph: fx.Graph, name: str) -> list[fx.Node]:
    """The calls of an operator, by its short name, in the order of the graph."""
    return list(graph.find_nodes(op="call_function", target=ops.overload(name)))


def is_call(value: Argument, name: str) -> bool:
    """Whether an argument is the result of an operator, by its short name."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target is ops.overload(name)


def is_constant(value: Argument) -> bool:
    """Whether an argument is a weight, table or cache."""
    return isinstance(value, fx.Node) and value.op == "get_attr"


def is_ready(value: Argument, place: fx.Node) -> bool:
    """Whether a call right before `place` could have an argument: no value, or one that is there by then."""
    return not isinstance(value, fx.Node) or value < place


def insert_call(before: fx.Node, name: str, *args: Argument) -> fx.Node:
    """Puts a call of an operator into the graph and returns it."""
    with before.graph.inserting_before(before):
        return before.graph.call_function(ops.overload(name), args)


def replace(old: fx.Node, new: fx.Node) -> None:
    """Gives all users of `old` the value `new`, and drops `old`."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
