"""What `pagecast plan show` prints: a model's step as a graph, what each pass did, the program and its arena.

Needs a model's sizes and the shapes of its weights, and computes nothing.
"""

from collections import Counter
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
class PassDone:
    """What one pass did to the step.

    Attributes:
        name: Of the pass.
        num_before: Launches before it.
        num_after: Launches after it.
        note: What else it saves; empty where launches are all.
    """

    name: str
    num_before: int
    num_after: int
    note: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A model's plan at each stage of its making.

    Attributes:
        before: The step as the model says it.
        after: What the passes made of it.
        passes: What each did, in order.
        program: Lowered from `after`.
        weight_bytes: What a step reads of weights, tables that are read by row left out.
    """

    before: StepGraph
    after: StepGraph
    passes: tuple[PassDone, ...]
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
    passes: list[PassDone] = []
    steps = [before]

    def on_pass(name: str, step: StepGraph) -> None:
        passes.append(PassDone(name, _num_calls(steps[-1]), _num_calls(step), _note(steps[-1], step)))
        steps.append(step)

    after = optimise(before, on_pass)
    max_blocks = -(-config.max_context_tokens // _BLOCK_SIZE)
    program = lower(after, Capacity(max_step_tokens, max_step_rows, max_blocks))
    return Shown(before, after, tuple(passes), program, _weight_bytes(program.launches, after))


def _num_calls(step: StepGraph) -> int:
    return sum(operator_name(node) not in (None, VIEW) for node in step.graph.nodes)


def _note(before: StepGraph, after: StepGraph) -> str:
    """What a pass saves that the number of launches does not tell."""
    if str(before.graph) == str(after.graph):
        return "finds nothing to change"
    head, head_after = (_head_of(step) for step in (before, after))
    return f"logits {head} -> {head_after}" if head != head_after else ""


def _head_of(step: StepGraph) -> str:
    """Shape of the last product's result: the logits, before or after those that are wanted are selected."""
    heads = [call.shapes[0] for call in calls_of(step) if call.operator == "linear"]
    return heads[-1] if heads else ""


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
    yield "T: tokens of a step; R: its rows, one a session; L: tokens whose logits are wanted"
    yield ""
    if with_before:
        calls = calls_of(shown.before)
        yield f"before the passes: {len(calls)} launches"
        yield from _graph_lines(sections_of(calls))
        yield ""
    yield "passes, and the launches before and after each"
    width = max(len(each.name) for each in shown.passes)
    for each in shown.passes:
        line = f"  {each.name:{width}}  {each.num_before:4} -> {each.num_after:4}"
        yield f"{line}  {each.note}" if each.note else line
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
    before: Section | None = None
    for section in sections:
        if section.title:
            yield f"  {section.title}{_difference(before, section)}"
            before = section
        indent = "    " if section.title else "  "
        names = max(len(call.name) for call in section.calls)
        operators = max(len(call.operator) for call in section.calls)
        shapes = max(len(_result(call)) for call in section.calls)
        for call in section.calls:
            read = ", ".join(argument.text for argument in call.arguments)
            start = f"{indent}{call.name:{names}}  {_result(call):{shapes}}"
            yield f"{start}  {call.operator:{operators}}  {read}"


def _difference(before: Section | None, section: Section) -> str:
    """What a layer launches that the one before does not, and the reverse: why both are shown."""
    if before is None:
        return ""
    one, other = (Counter(call.operator for call in each.calls) for each in (before, section))
    added, removed = (", ".join(sorted(names.elements())) for names in (other - one, one - other))
    if added and removed:
        told = f"{added} in place of {removed}"
    elif added or removed:
        told = f"also {added}" if added else f"no {removed}"
    else:
        return ""
    return f" (unlike the one before: {told})"


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
