"""`bench paging` on a tiny model: both layouts give the same bits, and what it says. Speed is not judged."""

import json
from dataclasses import replace

import pytest

from tests.bench.conftest import Run

pytest.importorskip("pagecast_native")

from bench import paging
from worker.plan.native import NativeExecutor

SHORT = ("--context", "2", "--context", "150", "--repeats", "3")


def test_one_json_object_tells_all(bench: Run) -> None:
    result = bench("paging", *SHORT, "--json", "--check", kernels="native")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert [(run["context"], run["what"]) for run in found["runs"]] == [
        (2, "paged / dense"),
        (150, "paged / dense"),
        (128, "max 8192 / max 1024"),
    ]
    for run in found["runs"]:
        assert all(0 < part < whole for part, whole in zip(run["attention_ms"], run["step_ms"], strict=True))
        assert run["step_ratio"] == run["step_ms"][0] / run["step_ms"][1]
        assert run["attention_ratio"] == run["attention_ms"][0] / run["attention_ms"][1]
    assert [check["passed"] for check in found["checks"]] == [r["step_ratio"] <= 1.05 for r in found["runs"]]
    assert result.exit_code == (not all(check["passed"] for check in found["checks"]))


def test_the_table_says_the_same(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = paging.measure

    def measure(*arguments):
        return [replace(pair, step_ms=(1.06, 1.0)) for pair in real(*arguments)]

    monkeypatch.setattr("bench.paging_report.measure", measure)
    result = bench("paging", "--context", "20", "--repeats", "1", kernels="native")
    assert result.exit_code == 0, result.output
    assert "1.1 / 1.0" in result.stdout
    assert "FAIL" not in result.stdout
    assert "idle machine" not in result.stdout
    assert (
        "Promised is the whole step's ratio, at most 1.05; attention alone is shown beside it."
        in result.stdout
    )
    result = bench("paging", "--context", "20", "--repeats", "1", "--check", kernels="native")
    assert result.exit_code == 1
    assert "FAIL 20 tokens, paged / dense: step 1.060, at most 1.05" in result.stdout
    assert result.stdout.count("idle machine") == 1


def test_other_bits_are_no_figures(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = paging._Step._in_one_piece

    def one_off(self, cache):
        piece = real(self, cache)
        piece[0, -1, 0] += 1.0
        return piece

    monkeypatch.setattr(paging._Step, "_in_one_piece", one_off)
    result = bench("paging", *SHORT, kernels="native")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: at 2 tokens the paged and the dense step differ in bits\n"


def test_the_dense_step_reads_no_block_table(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = []
    real = NativeExecutor._operand

    def operand(self, operand, **rest):
        if isinstance(self, paging._DenseExecutor):
            operands.append(operand)
        return real(self, operand, **rest)

    monkeypatch.setattr(NativeExecutor, "_operand", operand)
    assert bench("paging", "--context", "20", "--repeats", "1", kernels="native").exit_code == 0
    names = {getattr(each, "name", None) for each in operands}
    assert "query_start" in names
    assert "block_table" not in names


@pytest.mark.parametrize(
    ("arguments", "kernels", "message"),
    [
        ((), "reference", "paging is measured on native kernels, these are reference"),
        (("--context", "257"), "native", "--context: 257 is over 256"),
    ],
)
def test_what_cannot_be_measured_is_one_line(bench: Run, arguments, kernels: str, message: str) -> None:
    result = bench("paging", *arguments, kernels=kernels)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"error: {message}\n")
