"""How the programs of this side end where nothing of theirs decides it."""

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")

INTERRUPTED = """
import os, signal
from worker.plan.command_line import Program
import click

@click.group(cls=Program)
def main(): pass

@main.command()
def wait():
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()

main()
"""


def test_ctrl_c_ends_a_program_with_130() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "wait"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.skipif(not FULL.exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize("module", ["worker.plan", "bench"])
def test_a_full_disk_is_one_line(module: str) -> None:
    with FULL.open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")
