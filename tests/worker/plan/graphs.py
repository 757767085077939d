"""Small models, steps and hand-made graphs, and a plain loop that runs them over the references."""

from dataclasses import dataclass
from operator import getitem

import torch
from torch import Tensor, fx

from tests.worker.numerics import bits
from worker.kernels import ops
from worker.kv.storage import KvStorage
from worker.model.config import LlamaConfig
from worker.model.llama import LlamaModel
from worker.plan.graph import StepGraph, StepInputs, operator_name, trace

ROWS = ((20, 3), (1, 1), (9, 0), (17, 1), (33, 18), (16, 1))
"""Rows of the example step as (context_len, new tokens)."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_model(
    *,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    hidden_size: int = 48,
    intermediate_size: int = 80,
    tied: bool = True,
    factors: bool = False,
) -> LlamaModel:
    """A model of random weights."""
    config = LlamaConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=72,
        max_context_tokens=64,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
    )
    width, kv_width = num_heads * head_size, num_kv_heads * head_size
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (72, hidden_size),
        "output_norm.weight": (hidden_size,),
    }
    if not tied:
        shapes["output.weight"] = (72, hidden_size)
    for layer in range(num_layers):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (hidden_size,),
                "attn_q": (width, hidden_size),
                "attn_k": (kv_width, hidden_size),
                "attn_v": (kv_width, hidden_size),
                "attn_output": (hidden_size, width),
                "ffn_norm": (hidden_size,),
                "ffn_gate": (intermediate_size, hidden_size),
                "ffn_up": (intermediate_size, hidden_size),
                "ffn_down": (hidden_size, intermediate_size),
            }.items()
        }
    tensors = {name: draw(*shape, seed=seed) * 0.3 for seed, (name, shape) in enumerate(shapes.items())}
    if factors:
        tensors["rope_freqs.weight"] = torch.linspace(1, 8, head_size // 2)
    return LlamaModel(config, tensors)


@dataclass(frozen=True)
class Example:
    """A model, a pool and the inputs of one mixed step over it."""

    model: LlamaModel
    kv: KvStorage
    inputs: StepInputs

    @property
    def step(self) -> StepGraph:
        return trace(self.model, self.kv)

    def refill(self) -> None:
        """Gives the pool the content that every run starts from."""
        self.kv.data.copy_(draw(*self.kv.data.shape, seed=5))

    def run(self, step: StepGraph) -> tuple[Tensor, Tensor]:
        """Bits of the logits and of the pool afterwards."""
        self.refill()
        logits = run_graph(step, self.inputs._asdict())
        assert logits.isfinite().all()
        assert logits.std() > 0
        return bits(logits), bits(self.kv.data).clone()

    def close(self, one: StepGraph, other: StepGraph) -> None:
        """Asserts that two steps give logits and pools that differ by rounding alone."""
        for got, expected in zip(self.run(one), self.run(other), strict=True):
            torch.testing.assert_close(
                got.view(torch.float32), expected.view(torch.float32), rtol=1e-4, atol=1e-4
            )

    def equal(self, one: StepGraph, other: StepGraph) -> bool:
        """Whether two steps give the same bits of logits and pool."""
        return all(torch.equal(got, want) for got, want in zip(self.run(one), self.run(other), strict=True))


def make_example(**sizes: int | bool) -> Example:
    """An example over `make_model(**sizes)`, rows and wanted logits in `ROWS`."""
    model = make_model(**sizes)
    config = model.config
    kv = KvStorage(
        num_blocks=16,
        num_layers=config.num_layers,
        block_size=16,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
    )
    blocks = iter(torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist())
    table = torch.zeros(len(ROWS), 4, dtype=torch.int32)
    positions, slots, starts, wanted = [], [], [0], []
    for row, (context, count) in enumerate(ROWS):
        for logical in range(-(-context // 16)):
            table[row, logical] = next(blocks)
        mine = range(context - count, context)
        positions += mine
        slots += [int(table[row, position // 16]) * 16 + position % 16 for position in mine]
        starts.append(starts[-1] + count)
        if count and row != 4:
            wanted.append(starts[-1] - 1)
    return Example(
        model,
        kv,
        StepInputs(
            token_ids=torch.arange(len(positions), dtype=torch.int32) * 5 % 72,
            position=torch.tensor(positions, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            block_table=table,
            context_len=torch.tensor([context for context, _ in ROWS], dtype=torch.int32),
            query_start=torch.tensor(starts, dtype=torch.int32),
            logits_index=torch.tensor(wanted, dtype=torch.int32),
        ),
    )


class Maker:
    """Makes a graph by hand: `value` and `weight` before `call`, then `done`."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.tensors: dict[str, Tensor] = {}

    def value(self, name: str) -> fx.Node:
        return self.graph.placeholder(name)

    def weight(self, name: str, *shape: int) -> fx.Node:
        self.tensors[name] = draw(*shape, seed=len(self.tensors) + 10)
        return self.graph.get_attr(name)

    def call(self, operator: str, *args: object) -> fx.Node:
        return self.graph.call_function(ops.overload(operator), args)

    def done(self, *results: fx.Node) -> StepGraph:
        self.graph.output(results[0] if len(results) == 1 else results)
        return StepGraph(self.graph, self.tensors, {})


def run_graph(step: StepGraph, inputs: dict[str, Tensor]) -> Tensor:
    """Runs every node in order over the references."""
    implementations = ops.implementations("reference")
    values: dict[fx.Node, object] = {}
    for node in step.graph.nodes:
        args = fx.map_arg(node.args, values.__getitem__)
        if node.op == "placeholder":
            values[node] = inputs[node.target]
        elif node.op == "get_attr":
            parts = step.stacks.get(node.target, (node.target,))
            tensors = [step.tensors[part] for part in parts]
            values[node] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        elif node.target is getitem:
            values[node] = getitem(*args)
        elif node.op == "output":
            return args[0]
        else:
            values[node] = implementations[operator_name(node)](*args)
    raise AssertionError("no output")


def listing(step: StepGraph) -> list[str]:
    """The graph node by node: operator and what its arguments are, by position for calls."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in step.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            names[node] = str(node.target)
            continue
        args = ", ".join(str(fx.map_arg(arg, lambda arg: names[arg])) for arg in node.args)
        name = {"output": "return"}.get(node.op) or operator_name(node) or "part"
        names[node] = f"%{len(lines)}"
        lines.append(f"{name}({args})")
    return lines


def operators(step: StepGraph) -> list[str]:
    """Short names of what a program launches, in order: not columns and not parts of a result."""
    names = [operator_name(node) for node in step.graph.nodes]
    return [name for name in names if name not in (None, "columns")]


def constants(step: StepGraph) -> set[str]:
    return {str(node.target) for node in step.graph.find_nodes(op="get_attr")}
