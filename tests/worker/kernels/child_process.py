"""Runs tasks of a module in a process of its own: triton reads TRITON_INTERPRET only once."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_tasks(module: str, tasks: str, tmp_path: Path, *, timeout_s: float = 280) -> list[str]:
    """The words that `tests.worker.kernels.<module>` prints for its tasks, warnings being errors.

    Names of tasks are set apart by commas; all run in one process.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    child = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"tests.worker.kernels.{module}", tasks],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.split()
