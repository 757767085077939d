"""Runs Python in a process of its own: triton reads TRITON_INTERPRET only once, when it is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRITON_MARKS = [
    pytest.mark.triton,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the extra `triton` is not installed"
    ),
]
ROOT = Path(__file__).parents[3]


def run_python(*arguments: str, timeout_s: float = 280) -> list[str]:
    """The words that `python <arguments>` prints, warnings being errors; TRITON_INTERPRET is not set."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.split()


def run_module(name: str, *arguments: str, timeout_s: float = 280) -> list[str]:
    """The words that the module `tests.worker.<name>` prints."""
    return run_python("-m", f"tests.worker.{name}", *arguments, timeout_s=timeout_s)
