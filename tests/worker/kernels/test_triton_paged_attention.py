"""The Triton kernel, each time in a process of its own: under the interpreter, or compiled without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the extra `triton` is not installed"
    ),
]
ROOT = Path(__file__).parents[3]


def run_child(task: str, tmp_path: Path) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    child = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.worker.kernels.triton_in_child", task],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.split()


def test_matches_the_reference(tmp_path):
    assert run_child("compare", tmp_path) == ["32"]


def test_a_query_has_the_same_bits_in_any_company(tmp_path):
    assert run_child("invariance", tmp_path) == ["45"]


def test_compiles_for_sm_90_without_tf32(tmp_path):
    assert run_child("compile", tmp_path) == ["0"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no preparation")
def test_an_unprepared_process_is_told_so(tmp_path):
    assert run_child("unprepared", tmp_path) == ["True", "True"]
