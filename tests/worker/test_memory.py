import pytest
import torch

from worker import memory
from worker.memory import PoolTooLarge, available_bytes, check_pool_fits, total_bytes

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 bytes of memory, 600 of them free."""
    monkeypatch.setattr(memory, "total_bytes", lambda device: 1000)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 600)


def test_figures_of_this_machine() -> None:
    assert 0 < available_bytes(CPU) <= total_bytes(CPU)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("num_blocks", "share", "limit"),
    [(60, 1.0, None), (61, 1.0, 600), (50, 0.5, None), (51, 0.5, 500), (25, 0.25, None), (26, 0.25, 250)],
)
def test_a_pool_keeps_to_what_is_free_and_to_its_share(
    num_blocks: int, share: float, limit: int | None
) -> None:
    if limit is None:
        check_pool_fits(num_blocks, 10, CPU, share)
        return
    with pytest.raises(PoolTooLarge) as caught:
        check_pool_fits(num_blocks, 10, CPU, share)
    assert (caught.value.wanted_bytes, caught.value.available_bytes) == (num_blocks * 10, limit)
    assert "lower --kv-blocks" in str(caught.value)
