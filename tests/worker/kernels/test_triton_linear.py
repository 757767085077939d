"""Triton's products with a weight, and the embedding: under the interpreter, in processes of their own."""

import pytest

from tests.worker.kernels.child_process import TRITON_MARKS, run_module

pytestmark = TRITON_MARKS
CHILD = "kernels.triton_linear_in_child"


def test_products_are_exact_and_those_of_the_twins():
    assert run_module(CHILD, "compare") == ["13"]


def test_parts_of_k_embedding_and_refusals():
    assert run_module(CHILD, "planes", "embed", "refusals") == ["9", "18", "18"]


def test_a_row_has_the_same_bits_in_any_company():
    assert run_module(CHILD, "invariance") == ["48"]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_products_of_all_sizes_kinds_and_classes():
    assert run_module(CHILD, "compare_long", timeout_s=1400) == ["912"]
