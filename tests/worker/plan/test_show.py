"""What `plan show` prints and draws, of tiny models."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.tiny_model import write_tiny_gguf
from worker.model.llama import LlamaModel
from worker.model.weights.gguf import read_gguf
from worker.plan import dot
from worker.plan.__main__ import main
from worker.plan.outline import Call, Section, calls_of, sections_of
from worker.plan.show import _difference, model_of_shapes, plan_of, text_of

NUM_LAYERS = 4
LAUNCHES = 1 + 8 * NUM_LAYERS + 4
LAUNCHES_BEFORE = 1 + 16 * NUM_LAYERS + 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("show") / "tiny.gguf", num_layers=NUM_LAYERS)


def show(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["show", "--model", str(path), *arguments])


def test_a_model_of_shapes_has_the_real_ones_plan(path: Path) -> None:
    sizes = {"max_step_tokens": 8, "max_step_rows": 4}
    shapes, real = model_of_shapes(path), LlamaModel.from_gguf(read_gguf(path))
    assert all(tensor.is_meta for tensor in shapes.store.tensors.values())
    assert {name: tensor.shape for name, tensor in shapes.store.tensors.items()} == {
        name: tensor.shape for name, tensor in real.store.tensors.items()
    }
    shown, expected = plan_of(shapes, **sizes), plan_of(real, **sizes)
    assert shown.program == expected.program
    assert list(text_of(shown, with_before=True)) == list(text_of(expected, with_before=True))
    assert len(shown.program.launches) == len(calls_of(shown.after)) == LAUNCHES
    assert len(calls_of(shown.before)) == LAUNCHES_BEFORE


def test_weight_bytes_are_the_files_but_for_lookups(path: Path) -> None:
    shown = plan_of(model_of_shapes(path), max_step_tokens=8, max_step_rows=4)
    tensors = read_gguf(path).tensors
    tensors.pop(
        "token_embd.weight"
    )  # the head is a matrix of its own here; of this one a row a token is read
    assert shown.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_layers_that_are_alike_are_told_once(path: Path) -> None:
    text = show(path).stdout
    assert "after the passes: 37 launches" in text
    assert "before the passes" not in text
    titles = [line.strip() for line in text.splitlines() if re.match(r" +layer \d", line)]
    assert titles == [
        "layer 0",
        "layer 1, and 1 more like it (unlike the one before: add_rms_norm in place of rms_norm)",
        "layer 3 (unlike the one before: also add)",
    ]
    for line in (
        r"linear_swiglu_1 +\[T, 128\] +linear_swiglu +add_rms_norm_2\.1, blk\.1\.{ffn_gate, ffn_up}\.weight",
        r"rope_store +\[T, 64\] +rope_store +linear_29\[:, 0:64\], linear_29\[:, 64:96\], .*kv\.0\.values",
        r"linear_28 +\[L, 272\] +linear +rms_norm_8, output\.weight \[272, 64\]",
    ):
        assert re.search(line, text), f"{line} not in\n{text}"


def test_before_shows_the_model_as_it_is_written(path: Path) -> None:
    text = show(path, "--before").stdout
    before, _, after = text.partition("passes, and the launches")
    assert f"before the passes: {LAUNCHES_BEFORE} launches" in before
    assert "layer 0, and 3 more like it" in before
    assert re.search(r"store_kv +stores +store_kv +rope_1, linear_2, slot_mapping, kv\.0\.keys", before)
    assert "store_kv" not in after


def test_passes_lead_from_one_graph_to_the_other(path: Path) -> None:
    text = show(path).stdout
    counts = re.findall(r"^  (\w+) +(\d+) -> +(\d+)", text, re.MULTILINE)
    assert {"merge_projections", "fuse_swiglu", "remove_dead_code"} <= {name for name, _, _ in counts}
    assert counts[0][1] == str(LAUNCHES_BEFORE)
    assert counts[-1][2] == str(LAUNCHES)
    assert [after for _, _, after in counts[:-1]] == [before for _, before, _ in counts[1:]]
    notes = dict(re.findall(r"^  (\w+) +\d+ -> +\d+  (.+)$", text, re.MULTILINE))
    assert notes["select_logits_rows"] == "logits [T, 272] -> [L, 272]"
    assert notes["remove_dead_code"] == "finds nothing to change"
    assert not {"merge_projections", "fuse_swiglu"} & set(notes)


def test_letters_are_explained_first(path: Path) -> None:
    first = show(path).stdout.splitlines()[0]
    assert first == "T: tokens of a step; R: its rows, one a session; L: tokens whose logits are wanted"


def layer(number: int, *operators: str) -> Section:
    return Section(number, tuple(Call(name, name, (), (), number) for name in operators), 1)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (("add", "linear"), ("linear", "add"), ""),
        (("add",), ("add", "swiglu", "add"), " (unlike the one before: also add, swiglu)"),
        (("add", "linear"), ("linear",), " (unlike the one before: no add)"),
        (("add", "linear"), ("linear", "rope"), " (unlike the one before: rope in place of add)"),
    ],
)
def test_a_layer_that_is_apart_says_why(before: tuple[str, ...], after: tuple[str, ...], told: str) -> None:
    assert _difference(None, layer(0, *before)) == ""
    assert _difference(layer(0, *before), layer(1, *after)) == told


def test_the_arena_is_that_of_the_program(path: Path) -> None:
    result = show(path, "--max-step-tokens", "20", "--max-step-rows", "3")
    program = plan_of(model_of_shapes(path), max_step_tokens=20, max_step_rows=3).program
    assert f"arena: {program.arena_bytes:,} bytes for results of up to 20 tokens and 3 rows" in result.stdout
    assert f"; {program.unshared_bytes:,} without sharing" in result.stdout
    shown = result.stdout.partition("arena of layer 1, in bytes\n")[2].splitlines()[1:]
    values = {
        value.name.replace("_default", ""): value for launch in program.launches for value in launch.outputs
    }
    assert len(shown) == 10  # eight launches, two of them with two results
    for line in shown:
        name, start, end, rows = line.split()[:4]
        assert int(start.replace(",", "")) == 4 * values[name].offset
        assert int(end.replace(",", "")) - int(start.replace(",", "")) == 4 * 20 * values[name].row_stride
        assert rows == "20"


def test_dot_text_has_a_box_for_each_call_and_no_loose_end(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "step.dot"
    assert show(path, "--dot", str(out)).exit_code == 0
    text = out.read_text()
    boxes = re.findall(r'^ +"(\w+)" \[label', text, re.MULTILINE)
    assert len(boxes) == len(set(boxes)) == 1 + 8 + 8 + 9 + 3
    ends = {name for edge in re.findall(r'"(\w+)" -> "(\w+)"', text) for name in edge}
    assert ends == set(boxes)
    assert text.count("subgraph cluster") == 3
    # What layer 3 reads of layer 2 is drawn from layer 1.
    assert len(re.findall(r'-> "add_rms_norm_5" \[style=dashed\]', text)) == 2
    assert show(path, "--before", "--dot", str(out)).exit_code == 0
    assert "store_kv" in out.read_text()


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_graphviz_draws(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, start: bytes, *, upper: bool
):
    """Where it is installed; else a command of its name stands in."""
    calls = []

    def run(command, *, input: bytes, **rest):  # noqa: A002
        calls.append((command, input))
        return subprocess.CompletedProcess(command, 0, start + b" drawn", b"")

    monkeypatch.setattr(dot.subprocess, "run", run)
    monkeypatch.setattr(dot.shutil, "which", lambda name: f"/usr/bin/{name}")
    out = tmp_path / f"step.{ending.upper() if upper else ending}"
    assert show(path, "--dot", str(out)).exit_code == 0
    assert out.read_bytes() == start + b" drawn"
    ((command, text),) = calls
    assert command == ["dot", f"-T{ending}"]
    assert text.startswith(b"digraph step {")


def test_a_picture_that_cannot_be_is_one_line(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(name: Path) -> Result:
        result = show(path, "--dot", str(name))
        assert result.exit_code == 1
        return result

    monkeypatch.setenv("PATH", str(tmp_path))
    missing = failed(tmp_path / "a.svg")
    assert missing.stdout == ""
    assert missing.stderr == (
        "error: a.svg is drawn by Graphviz, whose command dot is not installed; a .dot file needs none\n"
    )
    tool = tmp_path / "dot"
    tool.write_text("#!/bin/sh\necho 'syntax error' >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert failed(tmp_path / "a.svg").stderr == "error: dot: syntax error\n"
    assert not (tmp_path / "a.svg").exists()
    (tmp_path / "a.dot").symlink_to(tmp_path / "nowhere" / "a.dot")
    unwritable = failed(tmp_path / "a.dot")
    assert unwritable.stderr == f"error: {tmp_path / 'a.dot'}: No such file or directory\n"
    assert "launches" in unwritable.stdout


@pytest.mark.parametrize(
    ("name", "told"),
    [("a.pdf", "a.pdf does not end in .svg, .png or .dot."), ("nowhere/a.dot", "there is no folder ")],
)
def test_a_file_that_cannot_be_is_refused_before_the_model_is_read(
    tmp_path: Path, name: str, told: str
) -> None:
    result = show(tmp_path / "nothing.gguf", "--dot", str(tmp_path / name))
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


def test_an_unknown_model_is_one_line(tmp_path: Path) -> None:
    result = show(tmp_path / "nothing.gguf")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "error: nothing.gguf: no such file\n")


def test_more_rows_than_tokens_are_not_planned(path: Path) -> None:
    assert show(path, "--max-step-tokens", "2", "--max-step-rows", "3").exit_code == 2


def test_sections_of_a_single_layer(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "one.gguf", num_layers=1)
    shown = plan_of(model_of_shapes(path), max_step_tokens=8, max_step_rows=4)
    assert [section.title for section in sections_of(calls_of(shown.after))] == ["", "layer 0", ""]
    assert "arena of layer 0, in bytes" in "\n".join(text_of(shown, with_before=False))


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, worker.plan.__main__; print([name for name in ('torch', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
