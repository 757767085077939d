"""The step as a torch.fx graph, and the shapes of its values. Knows operators only as calls; runs nothing."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import Argument
from torch.fx.proxy import GraphAppendingTracer

from worker.kernels import ops
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel

PROBE_TOKENS = 2_000_003
"""Number of tokens T that shapes are inferred with: no weight has so many rows or columns."""
PROBE_ROWS = 3_000_017
"""As `PROBE_TOKENS`, the number of rows R."""
PROBE_LOGITS = 4_000_037
"""As `PROBE_TOKENS`, the number of logits rows L."""
_PROBE_BLOCKS = 5_000_011


class StepInputs(NamedTuple):
    """What one step binds, in the order of `LlamaModel.forward_paged_step`; T tokens of R rows, L logits.

    A row may have no tokens: its two entries of `query_start` are equal, and nothing else of it is read.

    Attributes:
        token_ids: [T] int32.
        position: [T] int32.
        slot_mapping: [T] int64.
        block_table: [R, max_blocks] int32.
        context_len: [R] int32.
        query_start: [R + 1] int32.
        logits_index: [L] int32.
    """

    token_ids: Tensor
    position: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    context_len: Tensor
    query_start: Tensor
    logits_index: Tensor

    @property
    def num_bytes(self) -> int:
        """Size of all inputs."""
        return sum(tensor.nbytes for tensor in self)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A step as a graph.

    Attributes:
        graph: Placeholders named like the fields of `StepInputs`; then one `get_attr` node per constant,
            whose target is a name in `tensors` or a key of `stacks`; operator calls (of one with two
            results, `operator.getitem` 0 and 1); one output.
        tensors: Weights and rope tables by name, a layer's caches as `kv.N.keys` and `kv.N.values`.
        stacks: Names of the weights, one below the other, that make up each merged weight.
    """

    graph: fx.Graph
    tensors: Mapping[str, Tensor]
    stacks: dict[str, tuple[str, ...]]

    def copy(self) -> "StepGraph":
        """The same step in a graph of its own; tensors are shared."""
        graph = fx.Graph()
        output = graph.graph_copy(self.graph, {})
        graph.output(output)
        return StepGraph(graph, self.tensors, dict(self.stacks))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a constant, stacked or not.

        Raises:
            KeyError: There is no constant of that name.
        """
        if name not in self.stacks:
            return tuple(self.tensors[name].shape)
        shapes = [self.tensors[part].shape for part in self.stacks[name]]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def operator_name(node: fx.Node) -> str | None:
    """Short name, such as `linear`, of the operator that a node calls; None for any other node."""
    return ops.short_name(node.target) if node.op == "call_function" else None


class _StepTracer(GraphAppendingTracer):
    """Turns tensors met while tracing into named constants; refuses any that belongs to nobody."""

    def __init__(self, graph: fx.Graph, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(graph)
        self._names: dict[int, str] = {}
        for name, tensor in tensors.items():
            self._names.setdefault(id(tensor), name)
        self._nodes: dict[str, fx.Node] = {}
        self._last: fx.Node | None = None

    def create_arg(self, a: Any) -> Argument:
        if not isinstance(a, Tensor):
            return super().create_arg(a)
        name = self._names.get(id(a))
        if name is None:
            raise ValueError(f"a tensor of shape {tuple(a.shape)} is neither the model's nor the pool's")
        if name not in self._nodes:
            # Before all calls, so that a pass may put a call of any constant anywhere.
            place = self._last or next(
                node for node in reversed(self.graph.nodes) if node.op == "placeholder"
            )
            with self.graph.inserting_after(place):
                self._last = self._nodes[name] = self.graph.get_attr(name)
        return self._nodes[name]


def trace(model: LlamaModel, kv: KvStorage) -> StepGraph:
    """Traces one step of `model` over `kv`.

    Symbolic: the step runs once with placeholders for its inputs and no tensor is computed, so the graph
    holds for any T, R and L.

    Raises:
        ValueError: The step reads a tensor that is not of `model` or `kv`.
    """
    tensors = dict(model.store.tensors)
    for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
        tensors |= {f"kv.{layer}.keys": keys, f"kv.{layer}.values": values}
    graph = fx.Graph()
    tracer = _StepTracer(graph, tensors)
    # Traced values stand in for tensors: operators take both.
    inputs: dict[str, Any] = {name: fx.Proxy(graph.placeholder(name), tracer) for name in StepInputs._fields}
    logits: Any = model.forward_paged_step(**inputs, kv=kv)
    graph.output(logits.node)
    return StepGraph(graph, tensors, {})


def infer_shapes(step: StepGraph) -> None:
    """Notes at each node of the graph the shape of its value for `PROBE_TOKENS`, `_ROWS` and `_LOGITS`.

    `node.meta["shape"]` is a tuple of ints; a call with several results has a tuple of such tuples at
    `node.meta["shapes"]` instead, and one without a result (`store_kv`) neither. A first dimension equal
    to a probe size is the number of tokens, rows or logits rows; no other dimension can be.

    Raises:
        ValueError: A node is no input, constant or call of an operator.
    """
    sizes: dict[str, tuple[int, ...]] = {
        "token_ids": (PROBE_TOKENS,),
        "position": (PROBE_TOKENS,),
        "slot_mapping": (PROBE_TOKENS,),
        "block_table": (PROBE_ROWS, _PROBE_BLOCKS),
        "context_len": (PROBE_ROWS,),
        "query_start": (PROBE_ROWS + 1,),
        "logits_index": (PROBE_LOGITS,),
    }
    values: dict[fx.Node, Any] = {}

    def meta(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device="meta")

    for node in step.graph.nodes:
        name = operator_name(node)
        if name is not None:
            value = ops.fake(name)(*fx.map_arg(node.args, values.__getitem__))
        elif node.op == "placeholder" and node.target in sizes:
            value = meta(sizes[node.target])
        elif node.op == "get_attr":
            value = meta(step.shape(node.target))
        elif node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            value = values[source][index]
        elif node.op == "output":
            continue
        else:
            raise ValueError(f"node {node.name} ({node.op} {node.target}) is no part of a step")
        values[node] = value
        if isinstance(value, tuple):
            node.meta["shapes"] = tuple(tuple(result.shape) for result in value)
        elif value is not None:
            node.meta["shape"] = tuple(value.shape)
