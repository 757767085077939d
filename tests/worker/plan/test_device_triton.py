"""Plans over Triton's kernels, in processes of their own, under its interpreter."""

from tests.worker.kernels.child_process import TRITON_MARKS, run_module

pytestmark = TRITON_MARKS
CHILD = "plan.device_in_child"


def test_plan_on_and_off_are_equal_and_near_the_reference(tmp_path):
    assert run_module(CHILD, "gate", str(tmp_path)) == [str(5 + 8 + 2), "True"] * 2


def test_planes_are_those_that_products_leave(tmp_path):
    assert run_module(CHILD, "splits", str(tmp_path)) == [str(6 * 5 * 2)]


def test_steps_launched_ahead_draw_the_same_tokens(tmp_path):
    assert run_module(CHILD, "ahead", str(tmp_path)) == ["True", "True", "2", "True", "True"]
