"""Row kernels under the interpreter, against their twins and against themselves in other company."""

import importlib.util

import pytest

from tests.worker.kernels.child_process import run_tasks

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the extra `triton` is not installed"
    ),
]


def test_match_their_twins_stand_alone_and_name_what_does_not_fit(tmp_path):
    printed = run_tasks("rows_child", "compare,invariance,refusals", tmp_path)
    assert printed == ["24", "4", "named"]
