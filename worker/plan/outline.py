"""A step's graph as plain text values, layers that are alike told once. Knows no tensor and runs nothing."""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import fx

from worker.plan.graph import PROBE_LOGITS, PROBE_ROWS, PROBE_TOKENS, StepGraph, infer_shapes, operator_name

VIEW = "columns"
"""The operator that a program makes no launch of."""
_COUNTED = {PROBE_TOKENS: "T", PROBE_ROWS: "R", PROBE_ROWS + 1: "R + 1", PROBE_LOGITS: "L"}
_LAYER = re.compile(r"(?:blk|kv)\.(\d+)\.")
_BODY_ENDS = ("output_norm.weight", "output.weight", "logits_index")


@dataclass(frozen=True, slots=True)
class Argument:
    """What a call reads.

    Attributes:
        text: A weight's name with its shape, another constant's or a step input's name, a number, or a
            value's name: of several results `name.0`, of some columns `name[:, 0:576]`.
        source: Name of the call that computes it; None for anything else.
    """

    text: str
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call.

    Attributes:
        name: Of its value.
        operator: Short name.
        shapes: Of its results, with T tokens, R rows and L logits; none if it only writes the pool.
        arguments: What it reads.
        layer: The layer whose weights or cache it reads, or that of the calls before it; None outside.
    """

    name: str
    operator: str
    shapes: tuple[str, ...]
    arguments: tuple[Argument, ...]
    layer: int | None

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for calls that do the same in two layers."""
        read = tuple(_without_layer(each.text) if each.source is None else "" for each in self.arguments)
        return self.operator, self.shapes, read


@dataclass(frozen=True, slots=True)
class Section:
    """Calls that follow each other: those of one layer, or those before or behind the layers.

    Attributes:
        first_layer: Number of the layer; None outside the layers.
        calls: In order.
        num_alike: So many layers in a row, this one included, are the same but for their number.
    """

    first_layer: int | None
    calls: tuple[Call, ...]
    num_alike: int

    @property
    def title(self) -> str:
        """What stands above the section, empty outside the layers."""
        if self.first_layer is None:
            return ""
        more = f", and {self.num_alike - 1} more like it" if self.num_alike > 1 else ""
        return f"layer {self.first_layer}{more}"


def short(name: str) -> str:
    """A node's or value's name without the overload that torch puts into it."""
    return name.replace("_default", "")


def calls_of(step: StepGraph) -> list[Call]:
    """Every operator call that is a launch, in order; `columns` only says what its reader reads."""
    step = step.copy()
    infer_shapes(step)
    found: list[Call] = []
    layer: int | None = None
    for node in step.graph.nodes:
        name = operator_name(node)
        if name is None or name == VIEW:
            continue
        arguments = tuple(_argument(argument, step) for argument in node.args)
        layer = _layer_of(arguments, layer)
        results = node.meta.get("shapes") or ([node.meta["shape"]] if "shape" in node.meta else [])
        found.append(
            Call(short(node.name), name, tuple(_shape(shape) for shape in results), arguments, layer)
        )
    return found


def sections_of(calls: Sequence[Call]) -> list[Section]:
    """The calls cut at the borders of layers; of layers in a row that are alike, the first."""
    found: list[Section] = []
    for layer, of_layer in groupby(calls, key=lambda call: call.layer):
        section = Section(layer, tuple(of_layer), 1)
        if layer is not None and found and _alike(found[-1], section):
            found[-1] = replace(found[-1], num_alike=found[-1].num_alike + 1)
        else:
            found.append(section)
    return found


def _alike(one: Section, other: Section) -> bool:
    return one.first_layer is not None and [call.kind for call in one.calls] == [
        call.kind for call in other.calls
    ]


def _argument(argument: Any, step: StepGraph) -> Argument:
    if not isinstance(argument, fx.Node):
        return Argument(f"{argument:g}" if isinstance(argument, float) else str(argument))
    if argument.op == "placeholder":
        return Argument(argument.name)
    if argument.op == "get_attr":
        name = str(argument.target)
        if name.startswith(("kv.", "rope.")):
            return Argument(name)
        sizes = ", ".join(str(size) for size in step.shape(name))
        return Argument(f"{_merged(name, step)} [{sizes}]")
    if argument.target is operator.getitem:
        source, index = argument.args
        return Argument(f"{_argument(source, step).text}.{index}", _argument(source, step).source)
    if operator_name(argument) == VIEW:
        source, start, end = argument.args
        return Argument(f"{_argument(source, step).text}[:, {start}:{end}]", _argument(source, step).source)
    return Argument(short(argument.name), short(argument.name))


def _merged(name: str, step: StepGraph) -> str:
    """A weight's name; of a stack its parts' names with what they share told once: `blk.0.{a, b}.weight`."""
    parts = step.stacks.get(name)
    if parts is None:
        return name
    split = [part.split(".") for part in parts]
    if len({(tuple(words[:2]), tuple(words[3:])) for words in split}) != 1 or len(split[0]) < 3:
        return " + ".join(parts)
    middle = ", ".join(words[2] for words in split)
    return ".".join([*split[0][:2], f"{{{middle}}}", *split[0][3:]])


def _layer_of(arguments: Sequence[Argument], before: int | None) -> int | None:
    texts = [each.text for each in arguments if each.source is None]
    for text in texts:
        if found := _LAYER.match(text):
            return int(found.group(1))
    return None if any(text.startswith(_BODY_ENDS) for text in texts) else before


def _without_layer(text: str) -> str:
    return _LAYER.sub("", text)


def _shape(sizes: Sequence[int]) -> str:
    return f"[{', '.join(_COUNTED.get(size, str(size)) for size in sizes)}]"
