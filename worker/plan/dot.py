"""A step's outline as a picture: DOT text, and what Graphviz makes of it. Knows no graph of torch."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from worker.plan.command_line import PictureFailed
from worker.plan.outline import Call, Section

_COLORS = {
    "linear": "#cfe2f3",
    "linear_swiglu": "#cfe2f3",
    "paged_attention": "#f9cb9c",
    "rope_store": "#fff2cc",
    "store_kv": "#fff2cc",
    "rope": "#fff2cc",
}
_OTHER_COLOR = "#eeeeee"
DOT = ".dot"


def dot_of(sections: Sequence[Section], calls: Sequence[Call]) -> str:
    """DOT text: a box for each call of the sections, a frame for each layer, an arrow for each value.

    Args:
        sections: What is drawn; of layers that are alike the first.
        calls: All calls, those of the layers that are left out too.
    """
    return "\n".join(_lines(sections, calls)) + "\n"


def _lines(sections: Sequence[Section], calls: Sequence[Call]) -> Iterator[str]:
    shown = _shown_names(sections, calls)
    yield "digraph step {"
    yield '  graph [fontname="sans-serif" fontsize=12 rankdir=TB]'
    yield '  node [fontname="sans-serif" fontsize=10 shape=box style="rounded,filled"]'
    yield '  edge [fontname="sans-serif" fontsize=9 color="#666666"]'
    for number, section in enumerate(sections):
        if section.title:
            yield f"  subgraph cluster_{number} {{"
            yield f'    label={_quoted(section.title)} labeljust=l color="#999999"'
        for call in section.calls:
            label = "\\n".join(filter(None, (call.operator, _weights(call), " ".join(call.shapes))))
            color = _COLORS.get(call.operator, _OTHER_COLOR)
            yield f'    {_quoted(call.name)} [label={_quoted(label)} fillcolor="{color}"]'
        if section.title:
            yield "  }"
    for section in sections:
        for call in section.calls:
            for read in dict.fromkeys(argument.source for argument in call.arguments):
                if read is not None:
                    # A value of a layer that is left out comes from its likeness.
                    style = "" if shown[read] == read else " [style=dashed]"
                    yield f"  {_quoted(shown[read])} -> {_quoted(call.name)}{style}"
    yield "}"


def _shown_names(sections: Sequence[Section], calls: Sequence[Call]) -> dict[str, str]:
    """For every call the one that is drawn for it: itself, or that of the first layer like its own."""
    by_layer: dict[int, list[Call]] = {}
    for call in calls:
        if call.layer is not None:
            by_layer.setdefault(call.layer, []).append(call)
    names = {call.name: call.name for call in calls}
    for section in sections:
        if section.first_layer is not None:
            for layer in range(section.first_layer + 1, section.first_layer + section.num_alike):
                alike = zip(by_layer[layer], section.calls, strict=True)
                names |= {theirs.name: own.name for theirs, own in alike}
    return names


def _weights(call: Call) -> str:
    """Names of the weights that a call reads, without their shapes."""
    texts = (argument.text for argument in call.arguments if ".weight" in argument.text)
    return ", ".join(text.partition(" [")[0] for text in texts)


def _quoted(text: str) -> str:
    escaped = text.replace('"', '\\"')
    return f'"{escaped}"'


def require_graphviz(path: Path) -> None:
    """Raises PictureFailed where Graphviz would have to draw the file, and is not installed."""
    if path.suffix.lower() != DOT and shutil.which("dot") is None:
        raise PictureFailed(
            f"{path.name} is drawn by Graphviz, whose command dot is not installed; a .dot file needs none"
        )


def write(path: Path, text: str) -> None:
    """Write DOT text to a `.dot` file, or what Graphviz draws of it to a `.svg` or `.png` file.

    Raises:
        PictureFailed: Graphviz fails, or the file can't be written.
    """
    kind = path.suffix.lower()
    try:
        drawn = text.encode() if kind == DOT else _draw(kind.removeprefix("."), text.encode())
        path.write_bytes(drawn)
    except OSError as error:
        raise PictureFailed(f"{path}: {error.strerror}") from error


def _draw(kind: str, text: bytes) -> bytes:
    done = subprocess.run(["dot", f"-T{kind}"], input=text, capture_output=True, check=False)
    if done.returncode != 0:
        raise PictureFailed(f"dot: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
