"""The kernel that turns and stores, under the interpreter in a process of its own."""

import pytest

from tests.worker.kernels.child_process import TRITON_MARKS, run_module

pytestmark = TRITON_MARKS


def test_matches_the_reference():
    assert run_module("kernels.rope_in_child") == ["6"]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_matches_the_reference_in_all_sizes_and_dtypes():
    assert run_module("kernels.rope_in_child", "long", timeout_s=1100) == ["216"]
