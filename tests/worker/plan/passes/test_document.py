"""The pass that docs/plans.md writes, and its test, as they stand there."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.worker.plan.graphs import make_example, operators
from worker.plan import passes
from worker.plan.passes import optimise

ROOT = Path(__file__).parents[4]
NAME = "worker.plan.passes.join_columns"
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "plans.md").read_text(), re.DOTALL)
PASS, TEST = BLOCKS


def executed(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(source, f"docs/plans.md ({name})", "exec"), vars(module))
    return module


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The pass, as a module where its test looks for it."""
    module = executed(NAME, PASS)
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


@pytest.mark.parametrize("name", re.findall(r"^def (test_\w+)", TEST, re.MULTILINE))
def test_its_test_passes(written: ModuleType, name: str) -> None:
    getattr(executed("test_join_columns", TEST), name)()


def test_its_test_would_see_another_pass(written: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = executed(NAME, PASS.replace("offset + end", "offset + end - 1"))
    monkeypatch.setitem(sys.modules, NAME, wrong)
    with pytest.raises(AssertionError):
        executed("test_join_columns", TEST).test_before_and_after()


def test_it_finds_nothing_where_it_is_said_to_go(
    written: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_example().step
    before = operators(optimise(step))
    longer = (*passes.PASSES[:-1], written.join_columns, passes.PASSES[-1])
    assert [each.name for each in longer[-2:]] == ["join_columns", "remove_dead_code"]
    monkeypatch.setattr(passes, "PASSES", longer)
    graphs: dict[str, str] = {}
    after = optimise(step, lambda name, done: graphs.__setitem__(name, str(done.graph)))
    assert operators(after) == before
    assert graphs["join_columns"] == graphs["fuse_swiglu"]


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("worker/plan/passes/join_columns.py", PASS),
        ("tests/worker/plan/passes/test_join_columns.py", TEST),
    ],
)
def test_ruff_has_nothing_to_say(path: str, block: str) -> None:
    assert path in (ROOT / "docs" / "plans.md").read_text()
    # ruff knows a module of ours by its file, which the example has not got.
    ours = 'lint.isort.known-first-party=["tests", "worker"]'
    for command in (["check", "--config", ours], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "--stdin-filename", path, "-"],
            input=block,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
