"""A graph lowered to a flat launch list, and the loop that runs it. Knows no model and no batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from worker.kernels.ops import Implementation
from worker.plan.graph import StepGraph


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of one implementation.

    Attributes:
        operator: Qualified name, e.g. `pagecast.linear`.
        implementation: What is called.
        arguments: Slots that its arguments are read from.
        output: Slot that its result goes to.
        last_uses: Slots of intermediate results that nothing reads after this launch.
    """

    operator: str
    implementation: Implementation
    arguments: tuple[int, ...]
    output: int
    last_uses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A launch list over numbered slots: inputs first, then constants and results.

    Attributes:
        num_inputs: Slots 0 to `num_inputs - 1` are the inputs.
        constants: Initial content of all slots; None where an input or a result goes.
        launches: In order.
        output: Slot of the result.
    """

    num_inputs: int
    constants: tuple[Any, ...]
    launches: tuple[Launch, ...]
    output: int

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Runs every launch once.

        Raises:
            ValueError: The number of inputs is another.
        """
        if len(inputs) != self.num_inputs:
            raise ValueError(f"inputs: {len(inputs)} were given, the program takes {self.num_inputs}")
        slots = list(self.constants)
        slots[: self.num_inputs] = inputs
        for launch in self.launches:
            slots[launch.output] = launch.implementation(*[slots[index] for index in launch.arguments])
            for index in launch.last_uses:
                slots[index] = None
        result: Tensor = slots[self.output]
        return result


def lower(step: StepGraph, implementations: Mapping[str, Implementation]) -> Program:
    """Assigns a slot to every value of the graph and an implementation to every operator.

    Args:
        step: A traced step.
        implementations: By qualified operator name.

    Raises:
        ValueError: A node is no call of an operator that has an implementation.
    """
    slots: list[Any] = []
    slot_of: dict[fx.Node, int] = {}
    literal_slots: dict[float, int] = {}

    def new_slot(content: Any) -> int:
        slots.append(content)
        return len(slots) - 1

    def argument_slot(argument: Any) -> int:
        if isinstance(argument, fx.Node):
            return slot_of[argument]
        if not isinstance(argument, float):
            raise ValueError(f"argument {argument!r} is neither a value of the graph nor a float")
        if argument not in literal_slots:
            literal_slots[argument] = new_slot(argument)
        return literal_slots[argument]

    by_kind: dict[str, list[fx.Node]] = {"placeholder": [], "get_attr": [], "call_function": [], "output": []}
    for node in step.graph.nodes:
        if node.op not in by_kind:
            raise ValueError(f"node {node.name} is a {node.op}, not a call of an operator")
        by_kind[node.op].append(node)
    for node in by_kind["placeholder"]:
        slot_of[node] = new_slot(None)
    for node in by_kind["get_attr"]:
        slot_of[node] = new_slot(step.constants[str(node.target)])

    calls = by_kind["call_function"]
    last_user = {argument: node for node in calls for argument in node.all_input_nodes}
    launches = []
    (result,) = by_kind["output"][0].args
    for node in calls:
        operator = str(node.target).removesuffix(".default")
        if operator not in implementations:
            raise ValueError(f"node {node.name} calls {operator}, which has no implementation")
        arguments = tuple(argument_slot(argument) for argument in node.args)
        slot_of[node] = new_slot(None)
        dropped = tuple(
            slot_of[argument]
            for argument in node.all_input_nodes
            if argument.op == "call_function" and last_user[argument] is node and argument is not result
        )
        launches.append(Launch(operator, implementations[operator], arguments, slot_of[node], dropped))
    return Program(len(by_kind["placeholder"]), tuple(slots), tuple(launches), argument_slot(result))
