"""Turns a step's graph into a program: a launch for every operator, a place in the arena for every result.

Knows the graph and its shapes, no tensor's content and no executor.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from worker.plan.arena import Lifetime, place
from worker.plan.graph import (
    PROBE_LOGITS,
    PROBE_ROWS,
    PROBE_TOKENS,
    StepGraph,
    StepInputs,
    infer_shapes,
    operator_name,
)
from worker.plan.program import (
    LANES,
    Capacity,
    Constant,
    Extent,
    Input,
    KvLayer,
    Launch,
    Operand,
    Program,
    Value,
)

_EXTENTS = {PROBE_TOKENS: Extent.TOKENS, PROBE_ROWS: Extent.ROWS, PROBE_LOGITS: Extent.LOGITS}


@dataclass(slots=True)
class _Result:
    """What one launch computes: the value at offset 0, until the arena is laid out, and when it is used."""

    value: Value
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Columns of a result, from `start` on."""

    result: _Result
    name: str
    start: int
    width: int


class _Lowering:
    """One walk over a graph; every node gets its operand, every operator but `columns` a launch."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self._operands: dict[fx.Node, _Part | tuple[_Part, ...] | Operand] = {}
        self.calls: list[tuple[str, tuple[_Part | Operand, ...], tuple[_Result, ...]]] = []
        self.results: list[_Result] = []
        self.output: _Part | None = None
        for node in step.graph.nodes:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        name = operator_name(node)
        if node.op == "placeholder" and node.target in StepInputs._fields:
            self._operands[node] = Input(str(node.target))
        elif node.op == "get_attr":
            self._operands[node] = self._constant(str(node.target))
        elif node.op == "output":
            self.output = self._result_of(node.args[0])
            self.output.result.last = len(self.calls)
        elif node.target is operator.getitem:
            source, index = node.args
            parts: Any = self._operands[source]  # type: ignore[index]
            self._operands[node] = replace(parts[index], name=node.name)
        elif name == "columns":
            self._operands[node] = self._columns(node.name, *node.args)
        elif name is not None:
            self._launch(name, node)
        else:
            raise ValueError(f"node {node.name} ({node.op} {node.target}) is no part of a step")

    def _columns(self, name: str, x: object, start: Any, end: Any) -> _Part:
        whole = self._result_of(x)
        if not 0 <= start < end <= whole.width:
            raise ValueError(f"node {name}: columns {start}:{end} of {whole.width}")
        return _Part(whole.result, name, whole.start + start, end - start)

    def _launch(self, name: str, node: fx.Node) -> None:
        number = len(self.calls)
        arguments = tuple(self._argument(argument, node) for argument in node.args)
        for argument in arguments:
            if isinstance(argument, _Part):
                argument.result.last = number
        outputs = tuple(_Result(value, number, number) for value in _values(node))
        self.results += outputs
        self.calls.append((name, arguments, outputs))
        parts = tuple(_Part(result, result.value.name, 0, result.value.width) for result in outputs)
        if parts:
            self._operands[node] = parts if "shapes" in node.meta else parts[0]

    def _argument(self, argument: object, node: fx.Node) -> _Part | Operand:
        found = self._operands.get(argument) if isinstance(argument, fx.Node) else argument
        if isinstance(found, _Part | Input | Constant | KvLayer | float):
            return found
        raise ValueError(f"node {node.name}: argument {argument!r} is neither a single value nor a float")

    def _result_of(self, argument: object) -> _Part:
        found = self._operands.get(argument) if isinstance(argument, fx.Node) else None
        if not isinstance(found, _Part):
            raise ValueError(f"{argument!r} is not computed by a launch")
        return found

    def _constant(self, name: str) -> Constant | KvLayer:
        if name.startswith("kv."):
            _, layer, which = name.split(".")
            return KvLayer(int(layer), is_key=which == "keys")
        return Constant(self._step.stacks.get(name, (name,)))


def _values(node: fx.Node) -> Iterator[Value]:
    """What the node's launch writes, as if each were at the arena's start."""
    if "shapes" in node.meta:
        shapes, names = node.meta["shapes"], [f"{node.name}.{i}" for i in range(len(node.meta["shapes"]))]
    elif "shape" in node.meta:
        shapes, names = (node.meta["shape"],), [node.name]
    else:
        return
    for name, (count, width) in zip(names, shapes, strict=True):
        if count not in _EXTENTS:
            raise ValueError(f"node {node.name}: its first dimension is {count}, no number of the step's")
        yield Value(name, _EXTENTS[count], 0, -(-width // LANES) * LANES, width)


def lower(step: StepGraph, capacity: Capacity) -> Program:
    """Makes a program of a graph.

    Every result gets rows of whole cache lines; `columns` becomes a view of its argument.

    Args:
        step: Traced, with or without passes; shapes are noted at its nodes.
        capacity: What a run of the program may hold.

    Raises:
        ValueError: A node is no input, constant or call of an operator, an argument is neither a value nor
            a float, or the output is not logits rows.
    """
    infer_shapes(step)
    lowering = _Lowering(step)
    output, results = lowering.output, lowering.results
    if output is None or output.result.value.extent is not Extent.LOGITS:
        raise ValueError("the graph's output has no row for each token that logits are wanted for")
    sizes = [capacity.of(result.value.extent) * result.value.row_stride for result in results]
    lives = [Lifetime(size, result.first, result.last) for size, result in zip(sizes, results, strict=True)]
    placement = place(lives)
    offsets = {id(result): offset for result, offset in zip(results, placement.offsets, strict=True)}

    def placed(part: _Part) -> Value:
        offset = offsets[id(part.result)] + part.start
        return replace(part.result.value, name=part.name, offset=offset, width=part.width)

    launches = tuple(
        Launch(
            name,
            tuple(placed(argument) if isinstance(argument, _Part) else argument for argument in arguments),
            tuple(replace(result.value, offset=offsets[id(result)]) for result in outputs),
        )
        for name, arguments, outputs in lowering.calls
    )
    return Program(launches, placed(output), 4 * placement.num_floats, 4 * sum(sizes), capacity)
