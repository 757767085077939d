"""The GPU check without a GPU: what it would run, what it does on an interpreter, what failures become."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.gpu_check import SECTIONS, Found, Section, check, failures, print_found
from bench.gpu_values import Case, Clock, Line, Setting, run_cases

ROOT = Path(__file__).parents[2]
needs_triton = [
    pytest.mark.triton,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the extra `triton` is not installed"
    ),
]


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "bench.gpu_check", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def found_in(path: Path) -> dict[str, list[dict[str, Any]]]:
    sections = json.loads(path.read_text())["sections"]
    return {each["section"]: each["lines"] for each in sections}


class TestOfItself:
    pytestmark = needs_triton

    @pytest.mark.timeout(600)
    def test_a_dry_run_lists_every_section_s_cases(self, tmp_path: Path) -> None:
        result = gpu_check("--dry-run", "--minutes", "30", "--json", str(tmp_path / "found.json"))
        assert result.returncode == 0, result.stdout + result.stderr
        found = found_in(tmp_path / "found.json")
        assert list(found) == [section.name for section in SECTIONS]
        for lines in found.values():
            assert lines
            assert all(line["value"] is None and line["passed"] is None for line in lines)
        names = {line["name"] for lines in found.values() for line in lines}
        for model in ("TinyLlama-1.1B", "Llama-3-8B"):
            for rows in (1, 8, 64, 256):
                for context in (512, 4096, 32768):
                    assert any(
                        n.startswith(f"{model}: decode, {rows} rows, context {context}") for n in names
                    )
        assert {"attention, 16 rows of 4096", "attention, 1 rows of 32768"} <= names
        notes = {line["name"]: line["note"] for lines in found.values() for line in lines}
        assert "launches of the model" in notes["TinyLlama-1.1B: decode, 1 rows, context 512"]
        assert "stages" in notes["product q4_0 N=6144 K=4096, 1 rows"]
        assert "copy bandwidth" in result.stdout

    @pytest.mark.parametrize("section", ["card", "blocks"])
    def test_a_section_runs_on_a_cpu(self, section: str, tmp_path: Path) -> None:
        result = gpu_check("--device", "cpu", "--section", section, "--json", str(tmp_path / "found.json"))
        assert result.returncode == 0, result.stdout + result.stderr
        lines = found_in(tmp_path / "found.json")[section]
        assert any(line["value"] for line in lines)

    @pytest.mark.long
    @pytest.mark.timeout(1500)
    def test_all_sections_run_on_triton_s_interpreter(self, tmp_path: Path) -> None:
        result = gpu_check("--device", "cpu", "--minutes", "20", "--json", str(tmp_path / "found.json"))
        assert result.returncode == 0, result.stdout + result.stderr
        found = found_in(tmp_path / "found.json")
        for section, least in (("correctness", 25), ("invariance", 7), ("plan", 2), ("blocks", 1)):
            passed = [line["passed"] for line in found[section] if line["passed"] is not None]
            assert len(passed) >= least, section
            assert all(passed)
        assert not [line for lines in found.values() for line in lines if "left out" in line["note"]]

    def test_without_a_gpu_it_says_so(self) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        result = gpu_check("--section", "card")
        assert result.returncode == 1
        assert "no CUDA device" in result.stdout


def section_of(folder: Path, name: str, body: str) -> Section:
    (folder / f"{name}.py").write_text(
        f"import os, time\nfrom bench.gpu_values import Case, Line\n\ndef cases(setting):\n    {body}\n"
    )
    return Section(name, name, 10)


def test_a_section_that_ends_badly_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    first = "[Line('a', 1.0, 's')]"
    sections = [
        section_of(tmp_path, "killed", f"return [Case('a', lambda: {first}), Case('b', lambda: os.abort())]"),
        section_of(
            tmp_path, "slow", f"return [Case('a', lambda: {first}), Case('b', lambda: time.sleep(60))]"
        ),
        section_of(tmp_path, "raising", f"return [Case('b', lambda: [1 / 0]), Case('a', lambda: {first})]"),
        section_of(tmp_path, "unlisted", "raise OSError('no list')"),
        section_of(tmp_path, "good", f"return [Case('a', lambda: {first})]"),
    ]
    monkeypatch.setattr("bench.gpu_check._START_S", 1.0)
    found = list(check(sections, device="cpu", minutes=50 / 60, is_dry=False))
    assert [each.section for each in found] == ["killed", "slow", "raising", "unlisted", "good"]
    killed, slow, raising, unlisted, good = (each.lines for each in found)
    assert killed[0] == slow[0] == raising[1] == good[0] == Line("a", 1.0, "s")
    assert killed[1].note.startswith("the section ended with status -6")
    assert slow[1].note.startswith("the section was ended after ")
    assert (raising[0].name, raising[0].note) == ("b", "ZeroDivisionError: division by zero")
    assert unlisted[0].note == "the section ended with status 1: OSError: no list"
    assert good == (Line("a", 1.0, "s"),)
    assert len(failures(found)) == 4


def test_a_section_s_children_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold its pipes: what reads them would wait for compilers that nobody needs any more."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    child = "__import__('subprocess').run(['sleep', '60'])"
    section = section_of(tmp_path, "parent", f"return [Case('a', lambda: {child})]")
    start = time.perf_counter()
    (found,) = check([section], device="cpu", minutes=0.1, is_dry=False)
    assert found.lines[0].note.startswith("the section was ended after ")
    assert time.perf_counter() - start < 30


def test_kernels_are_compiled_before_sections_and_whatever_comes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    section = replace(section_of(tmp_path, "compiled", "return []"), compiled_in=2)
    compiled, found = check([section], device="cuda", minutes=2, is_dry=False)
    assert compiled.section == "compile"
    assert [(line.name, line.passed) for line in compiled.lines] == [("compiled", None)] * 2
    assert all("no CUDA device" in line.note for line in (*compiled.lines, *found.lines))
    assert [line.passed for line in found.lines] == [False]


COMPILING = """
from triton.runtime.jit import JITFunction
from bench.gpu_compile import compile_cases
from bench.gpu_values import Case, Clock, Line

calls = []
def run(self, *arguments, grid, warmup, **named):
    calls.append((arguments, grid, warmup, named))
    return type("Kernel", (), {"hash": arguments[0]})()
JITFunction.run = run
kernel = object.__new__(JITFunction)
def launch(*names):
    for name in names:
        kernel[(7,)](name, num_warps=4)
    return [Line("wrong", passed=False)]
def fail():
    launch("c")
    raise ArithmeticError("numbers of nobody")
cases = [Case("a", lambda: launch("a", "b", "a")), Case("b", fail)]
line = compile_cases("some", cases, Clock(60))
assert (line.name, line.note, line.passed) == ("some", "3 kernels", None), line
assert compile_cases("late", cases, Clock(0)).note == "0 kernels, 2 cases left out: the time is up"
assert calls == [((name,), (7,), True, {"num_warps": 4}) for name in "abac"], calls
assert JITFunction.run is run
launch("d")
assert calls[-1] == (("d",), (7,), False, {"num_warps": 4})
"""


@pytest.mark.triton
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the extra `triton` is not installed")
def test_what_compiles_alone_launches_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-c", COMPILING],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr


def test_cases_after_the_time_is_up_are_left_out() -> None:
    ran = []

    def run(name: str) -> Iterator[Line]:
        ran.append(name)
        yield Line(name, passed=True)

    lines = list(run_cases([Case("late", lambda: run("late"))], Clock(0.0)))
    assert (ran, [line.passed for line in lines]) == ([], [None])
    assert list(run_cases([Case("now", lambda: run("now"))], Clock(60.0))) == [Line("now", passed=True)]


def test_the_table_has_every_line_and_names_what_failed() -> None:
    found = [
        Found(
            "one",
            (Line("fast", 2.0, "ms", 1.5, passed=True), Line("slow", 4.0, "ms", 1.0, passed=False)),
            3.0,
        ),
        Found("two", (Line("unequal", passed=False, note="row 3"), Line("card", note="some card")), 4.0),
    ]
    out = io.StringIO()
    print_found(found, Console(file=out, width=160))
    text = out.getvalue()
    assert "FAIL one: slow\nFAIL two: unequal: row 3\n1 of 3 checks passed, in 7 s\n" in text
    for told in ("75%", "25%", "2 ms", "some card"):
        assert told in text


@pytest.mark.parametrize(("device", "seconds", "named"), [("tpu", 1.0, "device"), ("cpu", 0.0, "seconds")])
def test_a_wrong_setting_is_refused(device: str, seconds: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Setting(device, seconds)
