"""What `pagecast plan show` prints: a model's step as a graph, what each pass did, the program and its arena.

Needs a model's sizes and the shapes of its weights, and computes nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.model.weights.gguf import read_shapes
from worker.plan.graph import StepGraph, operator_name, trace
from worker.plan.lower import lower
from worker.plan.outline import VIEW, Call, Section, calls_of, sections_of, short
from worker.plan.passes import optimise
from worker.plan.program import Capacity, Constant, Launch, Program, Value

_META = torch.device("meta")
_BLOCK_SIZE = 16
# They read a row of their table for each token, whatever its size.
_TABLE_LOOKUPS = ("embedding", "rope", "rope_store")


@dataclass(frozen=True, slots=True)
class Shown:
    """A model's plan at each stage of its making.

    Attributes:
        before: The step as the model says it.
        after: What the passes made of it.
        passes: Name of each, and the launches before and after it.
        program: Lowered from `after`.
        weight_bytes: What a step reads of weights, tables that are read by row left out.
    """

    before: StepGraph
    after: StepGraph
    passes: tuple[tuple[str, int, int], ...]
    program: Program
    weight_bytes: int


def model_of_shapes(path: Path) -> LlamaModel:
    """A model that can be traced and has no weights: its tensors are on the device `meta`.

    Raises:
        worker.model.config.ModelFileError: The file is unreadable or no Llama model that is supported.
    """
    config, shapes = read_shapes(path)
    tensors = {name: torch.empty(shape, device=_META) for name, shape in shapes.items()}
    return LlamaModel(config, tensors, device=_META)


def plan_of(model: LlamaModel, *, max_step_tokens: int, max_step_rows: int) -> Shown:
    """Traces, optimises and lowers a model's step for that capacity.

    Args:
        model: Its tensors are not read.
        max_step_tokens: Tokens that a step may hold.
        max_step_rows: Rows that a step may hold.
    """
    config = model.config
    kv = KvStorage(
        num_blocks=1,
        num_layers=config.num_layers,
        block_size=_BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        device=_META,
    )
    before = trace(model, kv)
    passes: list[tuple[str, int, int]] = []

    def on_pass(name: str, step: StepGraph) -> None:
        passes.append((name, passes[-1][2] if passes else _num_calls(before), _num_calls(step)))

    after = optimise(before, on_pass)
    max_blocks = -(-config.max_context_tokens // _BLOCK_SIZE)
    program = lower(after, Capacity(max_step_tokens, max_step_rows, max_blocks))
    return Shown(before, after, tuple(passes), program, _weight_bytes(program.launches, after))


def _num_calls(step: StepGraph) -> int:
    return sum(operator_name(node) not in (None, VIEW) for node in step.graph.nodes)


def _weight_bytes(launches: Iterable[Launch], step: StepGraph) -> int:
    read = {
        part
        for launch in launches
        if launch.operator not in _TABLE_LOOKUPS
        for argument in launch.arguments
        if isinstance(argument, Constant)
        for part in argument.parts
    }
    return 4 * sum(prod(step.shape(name)) for name in read)


def text_of(shown: Shown, *, with_before: bool) -> Iterator[str]:
    """The lines that are printed.

    Args:
        shown: What is shown.
        with_before: Whether the graph before the passes is, too.
    """
    program = shown.program
    if with_before:
        calls = calls_of(shown.before)
        yield f"before the passes: {len(calls)} launches"
        yield from _graph_lines(sections_of(calls))
        yield ""
    yield "passes, and the launches before and after each"
    width = max(len(name) for name, _, _ in shown.passes)
    for name, num_before, num_after in shown.passes:
        yield f"  {name:{width}}  {num_before:4} -> {num_after:4}"
    yield ""
    sections = sections_of(calls_of(shown.after))
    yield f"after the passes: {len(program.launches)} launches"
    yield from _graph_lines(sections)
    yield ""
    yield f"weights that a step reads: {shown.weight_bytes:,} bytes, float32"
    saved = 1 - program.arena_bytes / program.unshared_bytes
    capacity = program.capacity
    yield (
        f"arena: {program.arena_bytes:,} bytes for results of up to {capacity.num_tokens} tokens and "
        f"{capacity.num_rows} rows; {program.unshared_bytes:,} without sharing ({saved:.1%} saved)"
    )
    yield from _arena_lines(program, max(sections, key=_weight))


def _weight(section: Section) -> tuple[bool, int]:
    """Sorts the most usual layer to the end."""
    return section.first_layer is not None, section.num_alike


def _graph_lines(sections: Iterable[Section]) -> Iterator[str]:
    for section in sections:
        if section.title:
            yield f"  {section.title}"
        indent = "    " if section.title else "  "
        names = max(len(call.name) for call in section.calls)
        operators = max(len(call.operator) for call in section.calls)
        shapes = max(len(_result(call)) for call in section.calls)
        for call in section.calls:
            read = ", ".join(argument.text for argument in call.arguments)
            start = f"{indent}{call.name:{names}}  {_result(call):{shapes}}"
            yield f"{start}  {call.operator:{operators}}  {read}"


def _result(call: Call) -> str:
    return " ".join(call.shapes) or "stores"


def _arena_lines(program: Program, section: Section) -> Iterator[str]:
    names = {call.name for call in section.calls}
    values = [
        value
        for launch in program.launches
        for value in launch.outputs
        if short(value.name).split(".")[0] in names
    ]
    yield f"arena of {section.title.split(',')[0] or 'the step'}, in bytes"
    rows: list[tuple[str, ...]] = [("value", "from", "to", "rows x floats")]
    rows += [_place(value, program.capacity) for value in values]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    aligned: tuple[Callable[[str, int], str], ...] = (str.ljust, str.rjust, str.rjust, str.rjust)
    for row in rows:
        yield "  " + "  ".join(
            align(cell, size) for align, cell, size in zip(aligned, row, widths, strict=True)
        )


def _place(value: Value, capacity: Capacity) -> tuple[str, ...]:
    start, rows = 4 * value.offset, capacity.of(value.extent)
    end = start + 4 * rows * value.row_stride
    return short(value.name), f"{start:,}", f"{end:,}", f"{rows} {value.extent.value} x {value.width}"
