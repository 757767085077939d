"""Row kernels under the interpreter, against their twins and against themselves in other company."""

from tests.worker.kernels.child_process import TRITON_MARKS, run_module

pytestmark = TRITON_MARKS


def test_match_their_twins_stand_alone_and_name_what_does_not_fit():
    printed = run_module("kernels.rows_child", "compare,invariance,refusals")
    assert printed == ["24", "4", "named"]
