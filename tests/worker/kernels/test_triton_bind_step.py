"""`bind_step` under the interpreter: steps of many sizes, one after the other."""

from tests.worker.kernels.child_process import TRITON_MARKS, run_module

pytestmark = TRITON_MARKS


def test_unpacks_and_pads_what_the_step_says():
    assert run_module("kernels.rows_child", "bind") == ["8"]
