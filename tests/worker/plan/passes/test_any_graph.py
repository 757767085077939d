"""Graphs of operators that no model has: the passes leave what each computes and what it stores."""

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from tests.worker.plan.graphs import Maker, draw, operators, run_graph
from worker.plan.graph import StepGraph
from worker.plan.passes import PASSES, optimise

TOKENS, LOGITS = 5, 3
WIDTH = 32
"""Of the step's values and of the caches: two heads of 16."""
CACHES = ("keys", "values", "more")
INPUTS = {
    "x": draw(TOKENS, WIDTH, seed=1),
    "y": draw(TOKENS, WIDTH, seed=2),
    "index": torch.tensor([4, 0, 2], dtype=torch.int32),
    "position": torch.tensor([1, 2, 3, 17, 18], dtype=torch.int32),
    "shifted": torch.tensor([0, 2, 3, 16, 18], dtype=torch.int32),
    "slots": torch.tensor([17, 18, 19, 1, 2]),
    "table": torch.tensor([[1, 3], [2, 0]], dtype=torch.int32),
    "context": torch.tensor([4, 19], dtype=torch.int32),
    "starts": torch.tensor([0, 3, 5], dtype=torch.int32),
}


@dataclass
class Drawn:
    """A graph that grows by drawn calls; values are chosen again and again, the last ones most often."""

    data: st.DataObject
    make: Maker = field(default_factory=Maker)
    values: list[tuple[fx.Node, int, int]] = field(default_factory=list)
    constants: dict[str, fx.Node] = field(default_factory=dict)
    num_matrices: int = 0

    def __post_init__(self) -> None:
        self.inputs = {name: self.make.value(name) for name in INPUTS}
        self.values += [(self.inputs[name], TOKENS, WIDTH) for name in "xy"]
        # Constants stand before all calls, as traced, or each before its first one.
        if self.data.draw(st.booleans(), "hoisted"):
            for name in (*CACHES, "cos", "sin", "half cos", "w0", "w1", "w2", "norm", "norm 2"):
                self.constant(name)

    def constant(self, name: str) -> fx.Node:
        if name not in self.constants:
            shape = {
                "norm": (WIDTH,),
                "norm 2": (WIDTH,),
                "cos": (32, 8),
                "sin": (32, 8),
                "half cos": (32, 4),
            }
            other = (4, 16, 2, 16) if name in CACHES else (WIDTH, WIDTH)
            self.constants[name] = self.make.weight(name, *shape.get(name, other))
            if name.startswith("w"):
                self.make.tensors[name] *= WIDTH**-0.5
        return self.constants[name]

    def matrix(self, rows: int, width: int) -> fx.Node:
        self.num_matrices += 1
        name = f"m{self.num_matrices}"
        node = self.make.weight(name, rows, width)
        self.make.tensors[name] *= width**-0.5
        return node

    def one_of(self, *choices):
        return self.data.draw(st.sampled_from(choices))

    def value(self, rows: int | None = None, width: int | None = None) -> tuple[fx.Node, int, int]:
        fit = [v for v in self.values if rows in (None, v[1]) and width in (None, v[2])]
        return fit[-1 - self.data.draw(st.integers(0, min(3, len(fit) - 1)))]

    def add(self, name: str, rows: int, width: int, *arguments: object) -> fx.Node:
        self.values.append((self.make.call(name, *arguments), rows, width))
        return self.values[-1][0]

    def linear(self) -> None:
        x, rows, width = self.value()
        if width == WIDTH and self.data.draw(st.booleans()):
            self.add("linear", rows, WIDTH, x, self.constant(self.one_of("w0", "w1", "w2")))
        for _ in range(self.one_of(1, 2, 3)):
            out = self.one_of(12, 16, 24, 32, 64)
            self.add("linear", rows, out, x, self.matrix(out, width))

    def gated(self) -> None:
        x, rows, width = self.value()
        half, total = self.one_of((16, 32), (12, 24), (8, 32), (32, 64), (16, 40))
        product = self.add("linear", rows, total, x, self.matrix(total, width))
        gate = self.add("columns", rows, half, product, 0, half)
        up = self.add("columns", rows, half, product, half, 2 * half)
        self.add("swiglu", rows, half, *self.one_of((gate, up), (gate, up), (up, gate), (gate, gate)))

    def two_values(self) -> None:
        x, rows, width = self.value()
        self.add(self.one_of("add", "add", "swiglu"), rows, width, x, self.value(rows, width)[0])

    def norm(self) -> None:
        x, rows, _ = self.value(width=WIDTH)
        self.add("rms_norm", rows, WIDTH, x, self.constant(self.one_of("norm", "norm 2")), 1e-5)

    def select(self) -> None:
        x, _, width = self.value(rows=TOKENS)
        self.add("select_rows", LOGITS, width, x, self.inputs["index"])

    def attend(self) -> None:
        def turned() -> fx.Node:
            x = self.value(TOKENS, WIDTH)[0]
            position = self.inputs[self.one_of("position", "position", "position", "shifted")]
            if self.data.draw(st.integers(0, 7)) == 0:
                half = self.constant("half cos")
                return self.add("rope", TOKENS, WIDTH, x, position, half, half)
            return self.add("rope", TOKENS, WIDTH, x, position, self.constant("cos"), self.constant("sin"))

        q, k = turned(), turned()
        v = self.one_of(k, *[self.value(TOKENS, WIDTH)[0]] * 3)
        keys, values = (self.constant(self.one_of(name, name, name, "more")) for name in ("keys", "values"))
        rows = [self.inputs[name] for name in ("table", "context", "starts")]
        self.make.call("store_kv", k, v, self.inputs["slots"], keys, values)
        self.add(
            "paged_attention", TOKENS, WIDTH, q, *self.one_of((keys, values), (values, keys)), *rows, 0.25
        )

    def done(self) -> StepGraph:
        chosen = [self.value()[0] for _ in range(self.one_of(1, 2))]
        return self.make.done(self.values[-1][0], *chosen)


def outcome(step: StepGraph) -> list[Tensor]:
    """The results, then the caches; those are put back."""
    caches = [step.tensors[name] for name in CACHES if name in step.tensors]
    before = [cache.clone() for cache in caches]
    results = [*run_graph(step, INPUTS), *(cache.clone() for cache in caches)]
    for cache, content in zip(caches, before, strict=True):
        cache.copy_(content)
    return results


def test_passes_leave_the_results_and_caches_of_any_graph():
    seen: set[str] = set()

    @settings(deadline=None, max_examples=200, derandomize=True, database=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        graph = Drawn(data)
        kinds = (graph.linear, graph.gated, graph.two_values, graph.norm, graph.select, graph.attend)
        for _ in range(data.draw(st.integers(1, 7))):
            data.draw(st.sampled_from(kinds))()
        step = graph.done()
        step.graph.lint()
        expected = outcome(step)
        for rewrite in (*PASSES, optimise):
            after = rewrite(step)
            after.graph.lint()
            for got, want in zip(outcome(after), expected, strict=True):
                scale = float(want.abs().max())
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * scale)
        seen.update(operators(after))

    check()
    assert {"rope_store", "add_rms_norm", "linear_swiglu"} <= seen
