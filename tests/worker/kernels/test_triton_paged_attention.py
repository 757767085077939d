"""The attention kernels under the interpreter, in processes of their own, and how a call is cut."""

import pytest
import torch

from tests.worker.kernels.child_process import TRITON_MARKS, run_module, run_python

pytestmark = TRITON_MARKS
CHILD = "kernels.triton_in_child"


def test_matches_float64():
    assert run_module(CHILD, "compare") == ["10"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_matches_the_reference_in_all_sizes_and_both_classes():
    assert run_module(CHILD, "compare_long", timeout_s=3500) == ["192"]


def test_views_refusals_and_a_query_has_the_same_bits_in_any_company():
    assert run_module(CHILD, "refusals", "views", "invariance") == ["refused", "56", "6", "42"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no preparation")
def test_an_unprepared_process_is_told_so():
    assert run_module(CHILD, "unprepared") == ["True", "True"]


CUT = """
from worker.batch import TokenClass
from worker.kernels.triton.attention_cut import attention_cut
from worker.kernels.triton.configs import attention_config
from worker.kernels.triton.paged_attention import workspace_floats
from worker.kernels.triton.targets import TARGETS

for target in TARGETS.values():
    for token_class in TokenClass:
        config = attention_config(target, token_class, head_size=128, kv_dtype="bfloat16")
        for longest in (1, 100, 8192, 32768, 131072, 1 << 20):
            bits = set()
            for bucket in (2**i for i in range(12)):
                sizes = dict(num_tokens=bucket, num_rows=min(bucket, 64), num_heads=32, num_kv_heads=8)
                cut = attention_cut(
                    config, **sizes, max_context_tokens=longest, num_sms=target.num_sms
                )
                bits.add((cut.block_m, cut.tile_queries, cut.span_tokens, cut.num_spans))
                assert cut.num_spans <= 256 and cut.num_spans * cut.span_tokens >= longest
                assert cut.span_tokens % config.block_n == 0
                assert 1 <= cut.num_programs <= cut.num_spans
                # A bucket that is full of long prompts is one program a tile, and needs two planes at most.
                floats = workspace_floats(
                    target,
                    token_class,
                    **sizes,
                    head_size=128,
                    kv_dtype="bfloat16",
                    max_context_tokens=longest,
                )
                assert floats <= max(2, cut.num_spans if cut.num_programs > 1 else 2) * bucket * 32 * 130
                # A single row of a long context fills the device.
                if bucket == 1 and longest >= 32768 and token_class is TokenClass.DECODE:
                    assert cut.num_programs * cut.num_tiles * 8 >= target.num_sms
            assert len(bits) == 1
print("same")
"""


def test_what_bits_depend_on_is_the_same_in_every_bucket():
    assert run_python("-c", CUT) == ["same"]
