"""Every case of sessions that this version has is named by a test."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Those that are about sharing prefixes, storing KV and forking come with what they are about.
CASES = frozenset({*range(1, 8), 12, 14, *range(17, 31), 32})
# Those that have to be seen from outside too.
OVER_GRPC = frozenset({*range(1, 8), 14, 17, 19, *range(23, 29), 30, 32})


def named_cases(sources: Iterable[str]) -> set[int]:
    """The numbers of `s01` to `s32` in the names of test functions."""
    found: set[int] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found |= {int(number) for number in re.findall(r"_s(\d\d)(?=_)", node.name)}
    return found


@pytest.mark.parametrize(("folder", "cases"), [(".", CASES), ("e2e", OVER_GRPC)])
def test_every_case_is_named_by_a_test(folder: str, cases: frozenset[int]) -> None:
    named = named_cases(path.read_text() for path in sorted((TESTS / folder).rglob("test_*.py")))
    assert sorted(cases - named) == []


def test_a_case_that_no_test_names_would_be_seen() -> None:
    source = "def test_s07_x(): ...\nasync def test_s01_s32_y(): ...\ndef s12_z(): ...\ndef test_as05(): ..."
    assert named_cases([source]) == {7, 1, 32}
