"""Plans over Triton's kernels, in processes of their own, under its interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the extra `triton` is not installed"
    ),
]
ROOT = Path(__file__).parents[3]


def run_child(task: str, tmp_path: Path) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.worker.plan.device_in_child", task, str(tmp_path)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.split()


def test_plan_on_and_off_are_equal_and_near_the_reference(tmp_path):
    assert run_child("gate", tmp_path) == [str(5 + 8 + 2), "True"] * 2


def test_planes_are_those_that_products_leave(tmp_path):
    assert run_child("splits", tmp_path) == [str(6 * 5 * 2)]


def test_steps_launched_ahead_draw_the_same_tokens(tmp_path):
    assert run_child("ahead", tmp_path) == ["True", "True", "2", "True", "True"]
