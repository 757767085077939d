"""`bench plan` on a tiny model: what it says, and that modes which differ fail it. Speed is not judged."""

import builtins
import io
import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rich.console import Console

from bench.arms import Arm, Step
from bench.loading import Bench
from bench.plan import MAX_HOST_BYTES, Check, compare, promises
from bench.plan_report import print_checks
from tests.bench.conftest import Run
from worker.batch import Batch, DecodePlan, PlanAction, RowResult
from worker.plan.gate import GateFailed
from worker.plan.policy import StepLogits
from worker.runner import Launched, Runner
from worker.sampling import Draw

SHORT = ("--prompt-tokens", "70", "--tokens", "19", "--sessions", "1", "--sessions", "3")
LAUNCHES = 1 + 2 * 8 + 4
"""Embedding, eight a layer, then add, select_rows, rms_norm and the head."""


def break_replan(monkeypatch: pytest.MonkeyPatch, at_position: int) -> None:
    """Moves one logit of REPLAN rows at and behind a position by the least that float32 knows."""
    run, launch = Runner.run, Runner.launch

    def move(batch: Batch, logits: Sequence[npt.NDArray[np.float32]]) -> None:
        row = batch.rows[-1]
        if row.plan is DecodePlan.REPLAN and row.context_len > at_position and logits:
            logits[-1][5] = np.nextafter(logits[-1][5], np.float32(np.inf))

    def moved_run(self: Runner, batch: Batch) -> StepLogits:
        found = run(self, batch)
        move(batch, found.rows)
        return found

    def moved_launch(self: Runner, batch: Batch, draws: Sequence[Draw]) -> Launched:
        found = launch(self, batch, draws).read()
        move(batch, found.logits)
        return found

    monkeypatch.setattr(Runner, "run", moved_run)
    monkeypatch.setattr(Runner, "launch", moved_launch)


def test_one_json_object_tells_all(bench: Run) -> None:
    result = bench("plan", *SHORT, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["kernels"] == "reference"
    assert (found["threads"], found["prompt_tokens"], found["tokens"]) == (1, 70, 19)
    assert [run["sessions"] for run in found["runs"]] == [1, 3]
    assert "checks" not in found
    for run in found["runs"]:
        num_steps = run["sessions"] * 2 + 19  # 70 tokens of prompt are two steps of at most 64
        once, replan = run["arms"]["PLAN_ONCE"], run["arms"]["REPLAN"]
        assert (once["builds"], once["reuses"], once["replans"]) == (1, num_steps - 1, 0)
        assert (replan["builds"], replan["reuses"], replan["replans"]) == (0, 0, num_steps)
        assert (run["tokens_equal"], run["max_logit_difference"]) == (True, 0.0)
        assert once["launches_per_token"] == replan["launches_per_token"] == LAUNCHES
        assert once["arena_bytes"] == replan["arena_bytes"] < found["unshared_arena_bytes"]
        # 4 + 4 + 8 of the token, 4 of its context and 4 of what is drawn, now and then a block.
        assert 24 <= once["host_bytes_per_token"] <= MAX_HOST_BYTES
        assert run["replan_over_plan_once"] == replan["ms_per_token"] / once["ms_per_token"]
        for arm in (once, replan):
            assert 0 < arm["plan_ms_per_token"] < arm["ms_per_token"] <= arm["p95_ms_per_token"]
            assert 0 < arm["outside_share"] < 1
            assert 0 < arm["sampling_ms_per_token"] < arm["ms_per_token"]


def test_the_table_has_both_modes_and_each_promise_a_line(bench: Run) -> None:
    result = bench("plan", *SHORT, "--check")
    lines = result.stdout.splitlines()
    assert sum("PLAN_ONCE" in line and line.rstrip().endswith("REPLAN") for line in lines) == 2
    told = [line for line in lines if line.startswith(("PASS ", "FAIL "))]
    assert told[0].startswith("PASS gate: ")
    assert len(told) == 1 + 2 * 7
    # A tiny model's kernels take no time: the share outside of them may fail, nothing else.
    assert all(line.startswith("PASS") or "outside kernels" in line for line in told)
    assert result.exit_code == any(line.startswith("FAIL") for line in told)


def test_json_has_the_checks(bench: Run) -> None:
    result = bench("plan", "--tokens", "4", "--sessions", "2", "--check", "--json")
    checks = json.loads(result.stdout)["checks"]
    assert len(checks) == 8
    assert result.exit_code == (not all(check["passed"] for check in checks))


def test_a_difference_in_one_bit_is_seen_without_check(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    break_replan(monkeypatch, at_position=80)
    result = bench("plan", *SHORT, "--json")
    assert result.exit_code == 1
    runs = json.loads(result.stdout)["runs"]
    assert all(0 < run["max_logit_difference"] < 1e-5 and run["tokens_equal"] for run in runs)


def test_a_gate_that_fails_ends_the_check(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    break_replan(monkeypatch, at_position=0)
    result = bench("plan", *SHORT, "--check")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert "logits differ" in result.stderr


def test_launches_that_change_are_no_figures(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Runner.launch

    def launch(self: Runner, batch: Batch, draws: Sequence[Draw]) -> Launched:
        found = real(self, batch, draws).read()
        odd = batch.rows[0].position % 2
        return found._replace(results=tuple(r._replace(launches=r.launches + odd) for r in found.results))

    monkeypatch.setattr(Runner, "launch", launch)
    bench = Bench.load(str(tiny_path), kernels="reference", num_threads=1)
    with pytest.raises(GateFailed, match=r"PLAN_ONCE: \(launches, arena bytes\)"):
        compare(bench, 1, prompt_tokens=3, tokens=4)


def test_promises_are_judged(tiny_path: Path) -> None:
    bench = Bench.load(str(tiny_path), kernels="reference", num_threads=1)
    found = compare(bench, 1, prompt_tokens=3, tokens=2)
    once, replan = found.arms[DecodePlan.PLAN_ONCE], found.arms[DecodePlan.REPLAN]
    once = replace(once, median_outside_share=0.05, host_bytes_per_token=256.0)
    kept = replace(found, arms={DecodePlan.PLAN_ONCE: once, DecodePlan.REPLAN: replan})
    assert all(check.passed for check in promises(kept))

    def broken(which: DecodePlan = DecodePlan.PLAN_ONCE, **values: Any) -> list[str]:
        arms = kept.arms | {which: replace(kept.arms[which], **values)}
        return [check.text for check in promises(replace(kept, arms=arms)) if not check.passed]

    assert broken(median_outside_share=0.061) == [
        "1 session: 6.1% of the runner's time outside kernels, at most 6%"
    ]
    assert broken(host_bytes_per_token=257.0) == ["1 session: 257 bytes per token and session, at most 256"]
    assert len(broken(builds=2)) == len(broken(replans=1)) == len(broken(launches_per_token=1)) == 1
    assert len(broken(DecodePlan.REPLAN, reuses=1)) == len(broken(DecodePlan.REPLAN, builds=1)) == 1
    many = replace(kept, num_sessions=8)
    assert [check.text for check in promises(many) if not check.passed] == [
        "8 sessions: 5.0% of the runner's time outside kernels, at most 3%"
    ]
    assert not promises(replace(kept, tokens_equal=False))[0].passed
    assert not promises(replace(kept, max_logit_difference=1e-9))[1].passed


def test_a_draw_is_no_time_outside_kernels() -> None:
    result = RowResult(PlanAction.REUSED, 5, 90, 60, 245, 24, 0, 1)
    assert Step(wall_ns=100, sampling_ns=20, result=result).outside_share == pytest.approx(0.2)


def test_an_arm_draws_as_the_engine_does(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Runner, "run")
    bench = Bench.load(str(tiny_path), kernels="reference", num_threads=1)
    arm = Arm(
        DecodePlan.PLAN_ONCE,
        bench.runner(bench.pool(4)),
        prompts=[[3, 1, 4], [1, 5]],
        block_tables=[(2,), (0,)],
        vocab_size=bench.llama.config.vocab_size,
        max_step_tokens=64,
    )
    first = arm.prefill()
    then = arm.decode(2)
    assert [logits.argmax() for logits in (*first, *then[0], *then[1])] == [
        *(log[-3] for log in arm.logs),
        *(log[-2] for log in arm.logs),
        *(log[-1] for log in arm.logs),
    ]
    assert [step.wall_ns > step.sampling_ns > 0 for step in arm.steps] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "300"), "error: --prompt-tokens, --tokens: 429 are over the model's 256"),
        (("--sessions", "33"), "error: --sessions: 33 are over 32"),
    ],
)
def test_what_does_not_fit_is_one_line(bench: Run, arguments: tuple[str, ...], message: str) -> None:
    result = bench("plan", *arguments)
    assert (result.exit_code, result.stdout, result.stderr.rstrip()) == (1, "", message)


def test_an_unknown_model_is_one_line(bench: Run) -> None:
    result = bench("plan", "--model", "nothing.gguf")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: nothing.gguf: no such file\n"


def test_a_picture_is_drawn(bench: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    result = bench("plan", "--tokens", "3", "--prompt-tokens", "3", "--plot", str(path))
    numbers = "float32 weights, float32 activations, float32 KV"
    assert f", {numbers}, reference kernels, 1 thread, " in result.stdout.splitlines()[0]
    assert ", 3 prompt + 3 drawn tokens" in result.stdout.splitlines()[0]
    assert result.exit_code == 0, result.output
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1260, 840)


def test_without_matplotlib_it_is_told_before_anything_runs(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.__main__.find_spec", lambda _: None)
    monkeypatch.setattr(Bench, "load", builtins.exit)
    result = bench("plan", "--plot", str(tmp_path / "plan.png"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: --plot needs matplotlib: in the repository run `pip install '.[bench]'`\n"


@pytest.mark.parametrize(
    ("name", "told"),
    [("plan.svg", "plan.svg does not end in .png."), ("nowhere/a.png", "there is no folder")],
)
def test_a_file_that_no_picture_can_go_to_is_refused_before_anything_is_loaded(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.setattr(Bench, "load", builtins.exit)
    result = bench("plan", "--plot", str(tmp_path / name))
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


def test_a_picture_that_fails_loses_no_figures(bench: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.PNG"
    path.symlink_to(tmp_path / "nowhere" / "plan.png")
    result = bench("plan", "--tokens", "2", "--sessions", "1", "--json", "--plot", str(path))
    assert result.exit_code == 1
    assert [run["sessions"] for run in json.loads(result.stdout)["runs"]] == [1]
    assert result.stderr == f"error: {path}: No such file or directory\n"


def test_only_speed_asks_for_an_idle_machine() -> None:
    def told(*checks: Check) -> list[str]:
        console = Console(record=True, width=200, file=io.StringIO())
        print_checks(console, checks)
        return console.export_text().splitlines()

    slow = Check(passed=False, text="slow", is_speed=True)
    lines = told(slow, Check(passed=True, text="kept", is_speed=True), replace(slow, text="slower"))
    assert lines[:3] == ["FAIL slow", "PASS kept", "FAIL slower"]
    assert len(lines) == 4
    assert "idle machine" in lines[3]
    assert told(Check(passed=False, text="other"), replace(slow, passed=True)) == ["FAIL other", "PASS slow"]


def test_kernels_in_any_case(bench: Run) -> None:
    result = bench("plan", "--tokens", "2", "--sessions", "1", "--json", kernels="REFERENCE")
    assert json.loads(result.stdout)["kernels"] == "reference"


@pytest.mark.parametrize("threads", ["0", "257"])
def test_threads_are_within_the_limits_of_kernels(bench: Run, threads: str) -> None:
    result = bench("steps", "--threads", threads)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "1<=x<=256" in result.stderr
