"""The step as a torch.fx graph. Knows the operators only as opaque calls and runs nothing."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.fx.node import Argument
from torch.fx.proxy import GraphAppendingTracer

from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel


class StepInputs(NamedTuple):
    """What one step binds, in the order of `LlamaModel.forward_paged_step`; T tokens of R rows, L logits.

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
    """A traced step.

    Attributes:
        graph: Placeholders named like the fields of `StepInputs`, `get_attr` nodes for constants,
            operator calls, one output.
        constants: Weights, tables and KV views by the target of their `get_attr` node.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]


class _StepTracer(GraphAppendingTracer):
    """Turns tensors met while tracing into named constants; refuses any that belongs to nobody."""

    def __init__(self, graph: fx.Graph, constants: dict[str, Tensor]) -> None:
        super().__init__(graph)
        self._names = {id(tensor): name for name, tensor in constants.items()}
        self._nodes: dict[str, fx.Node] = {}

    def create_arg(self, a: Any) -> Argument:
        if not isinstance(a, Tensor):
            return super().create_arg(a)
        name = self._names[id(a)]
        if name not in self._nodes:
            self._nodes[name] = self.graph.get_attr(name)
        return self._nodes[name]


def trace(model: LlamaModel, kv: KvStorage) -> StepGraph:
    """Traces one step of `model` over `kv`.

    Symbolic: the step runs once with placeholders for its inputs and no tensor is computed, so the graph
    holds for any T, R and L.
    """
    constants = dict(model.constants)
    for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
        constants |= {f"kv.{layer}.keys": keys, f"kv.{layer}.values": values}
    graph = fx.Graph()
    tracer = _StepTracer(graph, constants)
    # Traced values stand in for tensors: operators take both.
    inputs: dict[str, Any] = {name: fx.Proxy(graph.placeholder(name), tracer) for name in StepInputs._fields}
    logits: Any = model.forward_paged_step(**inputs, kv=kv)
    graph.output(logits.node)
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    return StepGraph(graph, {name: tensor for name, tensor in constants.items() if name in used})
