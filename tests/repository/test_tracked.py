"""What tests that are in the repository import of one another is there too, so that a clone can run them."""

import ast
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _names(source: str) -> Iterator[str]:
    """Modules under `tests` that a source imports, and what may be one: each name taken from one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in found if name.startswith("tests."))


def untracked(sources: Mapping[str, str], present: frozenset[str]) -> set[tuple[str, str]]:
    """(file, what it imports) where that is a module which is present and not among `sources`."""
    wrong = set()
    for path, source in sources.items():
        for name in _names(source):
            base = name.replace(".", "/")
            modules = {f"{base}.py", f"{base}/__init__.py"} & present
            wrong |= {(path, module) for module in modules - sources.keys()}
    return wrong


def test_what_tracked_tests_import_is_tracked() -> None:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "tests"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git here")
    names = [name for name in listed.stdout.split("\0") if name.endswith(".py")]
    sources = {name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()}
    present = frozenset(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py"))
    assert sources.keys() <= present
    assert sorted(untracked(sources, present)) == [], "git add them"


@pytest.mark.parametrize(
    "line", ["import tests.a.helper", "from tests.a.helper import x", "from tests.a import helper"]
)
def test_a_helper_that_was_forgotten_would_be_seen(line: str) -> None:
    present = frozenset({"tests/a/test_x.py", "tests/a/helper.py"})
    assert untracked({"tests/a/test_x.py": line}, present) == {("tests/a/test_x.py", "tests/a/helper.py")}
    assert untracked({"tests/a/test_x.py": line, "tests/a/helper.py": ""}, present) == set()
