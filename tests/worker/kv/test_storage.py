import pytest
import torch

from worker.kv.storage import KvStorage


def make() -> KvStorage:
    kv = KvStorage(num_blocks=5, num_layers=2, block_size=4, num_kv_heads=2, head_size=3)
    kv.data.fill_(float("nan"))
    return kv


def test_zeroing_touches_the_blocks_that_are_named_and_no_other() -> None:
    kv = make()
    kv.zero((3, 0))
    assert kv.data[[0, 3]].count_nonzero() == 0
    assert kv.data[[1, 2, 4]].isnan().all()
    # The layers' views are of the same memory.
    assert all(torch.equal(view[3], torch.zeros(4, 2, 3)) for view in (*kv.keys, *kv.values))


def test_a_head_of_a_block_is_dense_keys_by_element_and_values_by_token() -> None:
    kv = KvStorage(num_blocks=5, num_layers=2, block_size=4, num_kv_heads=2, head_size=3)
    kv.data.copy_(torch.arange(kv.data.numel()).view_as(kv.data))
    assert kv.data.shape == (5, 2, 2, 2, 12)
    for layer, block, token, head, element in ((0, 0, 0, 0, 0), (1, 3, 2, 1, 2), (0, 4, 3, 1, 1)):
        key_head = ((block * 2 + layer) * 2 + 0) * 2 + head
        value_head = ((block * 2 + layer) * 2 + 1) * 2 + head
        assert kv.keys[layer][block, token, head, element] == key_head * 12 + element * 4 + token
        assert kv.values[layer][block, token, head, element] == value_head * 12 + token * 3 + element
    assert all(view.shape == (5, 4, 2, 3) for view in (*kv.keys, *kv.values))
    assert kv.num_bytes == 5 * KvStorage.block_bytes(num_layers=2, block_size=4, num_kv_heads=2, head_size=3)


def test_zeroing_nothing_is_nothing() -> None:
    kv = make()
    kv.zero(())
    assert kv.data.isnan().all()


@pytest.mark.parametrize("block", [-1, 5])
def test_zeroing_a_block_that_is_not_there_changes_nothing(block: int) -> None:
    kv = make()
    with pytest.raises(ValueError, match=f"block {block} is not in 0..4"):
        kv.zero((1, block))
    assert kv.data.isnan().all()
