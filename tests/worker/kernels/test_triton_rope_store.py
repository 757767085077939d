"""The kernel that turns and stores, under the interpreter in a process of its own."""

import importlib.util

import pytest

from tests.worker.kernels.test_triton_paged_attention import run_child

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the extra `triton` is not installed"
    ),
]


def test_matches_the_reference():
    assert run_child(module="rope_in_child") == ["6"]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_matches_the_reference_in_all_sizes_and_dtypes():
    assert run_child("long", module="rope_in_child", timeout_s=1100) == ["216"]
