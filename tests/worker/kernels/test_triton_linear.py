"""Triton's products with a weight, and the embedding: under the interpreter, in processes of their own."""

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


def run_child(module: str, tmp_path: Path, *tasks: str, timeout: int = 120) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    child = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"tests.worker.kernels.{module}", *tasks],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.split()


def test_products_are_exact_and_those_of_the_twins(tmp_path):
    assert run_child("triton_linear_in_child", tmp_path, "compare") == ["13"]


def test_parts_of_k_embedding_and_refusals(tmp_path):
    assert run_child("triton_linear_in_child", tmp_path, "planes", "embed", "refusals") == ["9", "18", "18"]


def test_a_row_has_the_same_bits_in_any_company(tmp_path):
    assert run_child("triton_linear_in_child", tmp_path, "invariance") == ["48"]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_products_of_all_sizes_kinds_and_classes(tmp_path):
    assert run_child("triton_linear_in_child", tmp_path, "compare_long", timeout=1400) == ["912"]
