"""Turns a step's graph into a program: a launch for every operator, a place in the arena for every result.

Knows the graph and its shapes, no tensor's content and no executor.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

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
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FLOAT_BYTES = 4
Reader: TypeAlias = tuple[str, int]
"""An operator and the place of an argument among its own."""
_PRODUCTS: frozenset[Reader] = frozenset({("linear", 0), ("linear_swiglu", 0)})
_ATTENTION: frozenset[Reader] = frozenset({("paged_attention", 0)})
_ADDERS: frozenset[Reader] = frozenset(
    {("columns", 0), ("rope_store", 0), ("rope_store", 1), ("rope_store", 2), ("add_rms_norm", 1), ("add", 1)}
)
"""Who adds the planes of a product. Columns of planes are planes; who reads them is asked too."""
_NARROWING = frozenset({("rms_norm", 0), ("add_rms_norm", 1), ("linear_swiglu", 0), ("paged_attention", 0)})
"""Operators, and which of their results they can store in another dtype than float32."""


@dataclass(slots=True)
class _Result:
    """What one launch computes: the value at offset 0, until the arena is laid out, and who uses it when.

    `readers` has None for the program's output.
    """

    value: Value
    first: int
    last: int
    readers: set[Reader | None]


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
            self.output.result.readers.add(None)
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
        whole.result.readers.add(("columns", 0))
        if not 0 <= start < end <= whole.width:
            raise ValueError(f"node {name}: columns {start}:{end} of {whole.width}")
        return _Part(whole.result, name, whole.start + start, end - start)

    def _launch(self, name: str, node: fx.Node) -> None:
        number = len(self.calls)
        arguments = tuple(self._argument(argument, node) for argument in node.args)
        for position, argument in enumerate(arguments):
            if isinstance(argument, _Part):
                argument.result.last = number
                argument.result.readers.add((name, position))
        outputs = tuple(_Result(value, number, number, set()) for value in _values(node))
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


def _narrow(value: Value, dtype: str) -> Value:
    """The value with elements of `dtype`, its rows whole cache lines again."""
    row_bytes = value.width * _ITEM_BYTES[dtype]
    lines = -(-row_bytes // (LANES * _FLOAT_BYTES))
    return replace(value, dtype=dtype, row_stride=lines * LANES)


def _shape_results(
    lowering: _Lowering,
    capacity: Capacity,
    *,
    narrow: str,
    q_narrow: str,
    planes: Callable[[tuple[str, ...]], int] | None,
) -> None:
    """Gives results the dtypes and planes that all of their readers can take."""
    for name, arguments, outputs in lowering.calls:
        for number, result in enumerate(outputs):
            value, readers = result.value, result.readers
            if (name, number) in _NARROWING and readers and readers <= _PRODUCTS:
                result.value = _narrow(value, narrow)
            elif name == "rope_store" and readers and readers <= _ATTENTION:
                result.value = _narrow(value, q_narrow)
            elif name == "linear" and planes is not None and readers and readers <= _ADDERS:
                weight = arguments[1]
                count = planes(weight.parts) if isinstance(weight, Constant) else 1
                if count > 1:
                    stride = capacity.of(value.extent) * value.row_stride
                    result.value = replace(value, planes=count, plane_stride=stride)


def lower(
    step: StepGraph,
    capacity: Capacity,
    *,
    narrow: str = "float32",
    q_narrow: str = "float32",
    planes: Callable[[tuple[str, ...]], int] | None = None,
) -> Program:
    """Makes a program of a graph.

    Every result gets rows of whole cache lines; `columns` becomes a view of its argument.

    Args:
        step: Traced, with or without passes; shapes are noted at its nodes.
        capacity: What a run of the program may hold.
        narrow: Dtype of values that products alone read: they round them to it anyway.
        q_narrow: Likewise of queries that attention alone reads.
        planes: Tells, by the names of a weight's parts, in how many planes a product with it leaves its
            partial sums; asked where every reader adds planes. None: every product is one plane.

    Raises:
        ValueError: A node is no input, constant or call of an operator, an argument is neither a value nor
            a float, the output is not logits rows, or a dtype is unknown.
    """
    for name, dtype in (("narrow", narrow), ("q_narrow", q_narrow)):
        if dtype not in _ITEM_BYTES:
            raise ValueError(f"{name}={dtype!r} is none of {', '.join(_ITEM_BYTES)}")
    infer_shapes(step)
    lowering = _Lowering(step)
    output, results = lowering.output, lowering.results
    if output is None or output.result.value.extent is not Extent.LOGITS:
        raise ValueError("the graph's output has no row for each token that logits are wanted for")
    _shape_results(lowering, capacity, narrow=narrow, q_narrow=q_narrow, planes=planes)
    sizes = [
        result.value.planes * capacity.of(result.value.extent) * result.value.row_stride for result in results
    ]
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
