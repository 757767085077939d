import gc
from pathlib import Path

import pytest
import torch

from worker.kv.pages import HUGE_PAGE_BYTES, zeros_on_huge_pages


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 1 << 19), (7, 300_001)])
def test_zeros_start_at_a_huge_page(shape):
    zeros = zeros_on_huge_pages(*shape)
    assert (zeros.shape, zeros.dtype) == (shape, torch.float32)
    assert zeros.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not zeros.any()
    zeros.fill_(1.0)
    assert zeros.all()


def test_nothing_is_shared_and_all_is_given_back():
    def mapped_kb() -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmSize"))
        return int(line.split()[1])

    first, second = (zeros_on_huge_pages(1 << 24) for _ in range(2))
    first.fill_(2.0)
    assert not second.any()
    before = mapped_kb()
    view = first[3:4]
    del first, second
    gc.collect()
    assert before - mapped_kb() >= 1 << 16
    assert view.item() == 2.0
