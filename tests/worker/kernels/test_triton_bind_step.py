"""`bind_step` under the interpreter: steps of many sizes, one after the other."""

import importlib.util

import pytest

from tests.worker.kernels.child_process import run_tasks

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the extra `triton` is not installed"
    ),
]


def test_unpacks_and_pads_what_the_step_says(tmp_path):
    assert run_tasks("rows_child", "bind", tmp_path) == ["8"]
