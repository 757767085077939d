import pytest
import torch

from worker import memory
from worker.memory import (
    MOST_BLOCKS,
    PoolTooLarge,
    available_bytes,
    blocks_that_fit,
    check_pool_fits,
    out_of_memory,
    total_bytes,
)

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 bytes of memory, 600 of them free, and of the others 100 held by this process."""
    monkeypatch.setattr(memory, "total_bytes", lambda device: 1000)
    monkeypatch.setattr(memory, "held_bytes", lambda device: 100)
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


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    # A twentieth of the worker's part is left: of all that is free, or of the part less what it holds.
    ("share", "block_bytes", "num_blocks"),
    [(1.0, 10, 55), (0.5, 10, 37), (0.5, 9, 41), (0.25, 10, 13), (0.25, 138, 1)],
)
def test_a_pool_takes_what_is_left_beside_weights_and_plans(
    share: float, block_bytes: int, num_blocks: int
) -> None:
    assert blocks_that_fit(block_bytes, CPU, share) == num_blocks


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("share", "block_bytes"), [(0.25, 139), (0.05, 1)])
def test_a_device_without_room_for_a_block_is_refused(share: float, block_bytes: int) -> None:
    with pytest.raises(PoolTooLarge, match=f"1 blocks takes {block_bytes} bytes"):
        blocks_that_fit(block_bytes, CPU, share)


def test_a_pool_has_no_more_blocks_than_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("total_bytes", 2**40), ("available_bytes", 2**40), ("held_bytes", 0)):
        monkeypatch.setattr(memory, name, lambda device, size=size: size)
    assert blocks_that_fit(1, CPU) == MOST_BLOCKS


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it."),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("Triton Error [HIP]:  Code: 2, Messsage: out of memory"),
    ],
)
def test_an_error_for_lack_of_memory_says_what_to_lower(error: Exception) -> None:
    told = out_of_memory(error)
    for flag in ("--kv-blocks", "--max-step-tokens", "--kv-dtype", "--weights"):
        assert flag in told
    assert str(error).splitlines()[0] in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("out of luck"), ValueError("out of memory")])
def test_other_errors_are_none_of_memory(error: Exception) -> None:
    assert out_of_memory(error) == ""
