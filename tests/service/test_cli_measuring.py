"""`pagecast bench` and `pagecast plan` hand everything on and take the other program's exit status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.cli import main, measuring

Handed = list[list[str]]


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Handed:
    """What the process would have become."""
    commands: Handed = []

    def execv(program: str, command: list[str]) -> None:
        assert program == sys.executable
        commands.append(command)
        raise SystemExit(7)

    monkeypatch.setattr(os, "execv", execv)
    return commands


@pytest.mark.parametrize(("command", "module"), [("bench", "bench"), ("plan", "worker.plan")])
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["-h"],
        ["show", "--json", "-x", "a b", "--sessions", "1", "--sessions=8", "--model", "-m.gguf"],
        ["show", "--", "--version"],
    ],
)
def test_every_argument_is_handed_on(handed: Handed, command: str, module: str, arguments: list[str]) -> None:
    assert CliRunner().invoke(main, [command, *arguments]).exit_code == 7
    # click takes the first `--` for itself; what stands behind it is an argument all the same.
    passed = [argument for argument in arguments if argument != "--"]
    assert handed == [[sys.executable, "-P", "-m", module, *passed]]


def test_without_the_workers_side_it_is_told(handed: Handed, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measuring.find_spec
    monkeypatch.setattr(measuring, "find_spec", lambda name: None if name == "torch" else found(name))
    result = CliRunner().invoke(main, ["bench", "plan"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: NOT_INSTALLED: this needs torch: install the extra `worker`")
    assert handed == []


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["bench", "--help"], 0, "paging"),
        (["plan", "show", "--help"], 0, "--before"),
        (["bench", "nothing"], 2, "No such command 'nothing'"),
    ],
)
def test_the_program_itself_answers(tmp_path: Path, arguments: list[str], code: int, word: str) -> None:
    """From a folder with packages of the same names, which are not what is meant."""
    for name in ("bench", "worker"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a wrong package')\n")
    script = "from service.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert word in ended.stdout + ended.stderr
