"""KV storages of other dtypes and key layouts, and copies of their blocks to host memory and back."""

import numpy as np
import pytest
import torch

from worker.kv.host_blocks import HostBlocks
from worker.kv.storage import KV_DTYPES, KvStorage

SIZES = {"num_layers": 2, "block_size": 4, "num_kv_heads": 2, "head_size": 8}
FP8 = torch.float8_e4m3fn
ELEMENTS = 2 * 2 * 4 * 2 * 8


def bytes_of(dtype: torch.dtype) -> int:
    """Of a block; of int8 each token and head have scales."""
    return ELEMENTS * dtype.itemsize + (4 * ELEMENTS // 8 if dtype == torch.int8 else 0)


def make(dtype: torch.dtype = torch.float32, *, num_blocks: int = 5, **rest: object) -> KvStorage:
    return KvStorage(num_blocks=num_blocks, dtype=dtype, **SIZES, **rest)  # type: ignore[arg-type]


def bits(kv: KvStorage) -> torch.Tensor:
    """Each block's bytes, as the very memory of the storage."""
    return kv.data.view(kv.num_blocks, -1).view(torch.uint8)


def scramble(kv: KvStorage, seed: int = 0) -> None:
    """Random bytes: NaNs of every payload, infinities, numbers below the normal ones."""
    generator = torch.Generator().manual_seed(seed)
    bits(kv).copy_(torch.randint(0, 256, bits(kv).shape, generator=generator, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
@pytest.mark.parametrize("keys", ["across", "as values"])
def test_every_kind_has_its_size_its_views_and_zeros(dtype: torch.dtype, keys: str) -> None:
    keys_across = keys == "across"
    kv = make(dtype, keys_across=keys_across)
    assert kv.block_bytes(**SIZES, dtype=dtype) == bytes_of(dtype)
    assert kv.num_bytes == 5 * bytes_of(dtype)
    assert not bits(kv).any()
    for layer, block, token, head, element in ((0, 0, 0, 0, 0), (1, 3, 2, 1, 7), (0, 4, 3, 1, 1)):
        scramble(kv)
        kv.keys[layer][block, token, head, element] = torch.tensor(3.0).to(dtype)
        kv.values[layer][block, token, head, element] = torch.tensor(-3.0).to(dtype)
        key, value = kv.data[block, layer, :, head]
        assert key[element * 4 + token if keys_across else token * 8 + element].float() == 3.0
        assert value[token * 8 + element].float() == -3.0
    kv.zero((1, 3))
    assert not bits(kv)[[1, 3]].any()
    assert bits(kv)[[0, 2, 4]].any(1).all()


def test_keys_that_lie_as_values_do_are_dense_per_head() -> None:
    kv = make(keys_across=False)
    for view in (*kv.keys, *kv.values):
        assert view.shape == (5, 4, 2, 8)
        assert view.stride()[1:] == (8, 4 * 8, 1)


def test_scales_are_ones_unless_given_and_only_where_they_mean_something() -> None:
    assert make().key_scales is None
    kv = make(FP8, value_scales=torch.full((2, 2), 0.5))
    assert kv.key_scales is not None
    assert kv.value_scales is not None
    assert [scales.tolist() for scales in kv.key_scales] == [[1.0, 1.0], [1.0, 1.0]]
    assert [scales.tolist() for scales in kv.value_scales] == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("keys", ["across", "as values"])
def test_scales_of_int8_lie_behind_their_heads_elements(keys: str) -> None:
    kv = make(torch.int8, keys_across=keys == "across")
    assert kv.key_scales is not None
    assert kv.value_scales is not None
    for layer, block, token, head in ((0, 0, 0, 0), (1, 3, 2, 1), (0, 4, 3, 1)):
        scramble(kv)
        elements = kv.data[..., :32].clone()
        kv.key_scales[layer][block, token, head] = 0.5
        kv.value_scales[layer][block, token, head] = -2.0
        key, value = kv.data[block, layer, :, head]
        assert key[32:].view(torch.float32)[token] == 0.5
        assert value[32:].view(torch.float32)[token] == -2.0
        assert torch.equal(kv.data[..., :32], elements)
    kv.zero((4,))
    assert not kv.key_scales[0][4].any()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"dtype": torch.float64}, "dtype=torch.float64 is none of float32, float16"),
        ({"num_blocks": 0}, "num_blocks=0 is below 1"),
        ({"dtype": torch.int8, "device": torch.device("meta")}, "dtype=torch.int8 is for host memory, not"),
        ({"dtype": torch.int8, "key_scales": torch.ones(2, 2)}, "key_scales is for float8_e4m3fn"),
        (
            {"key_scales": torch.ones(2, 2)},
            "key_scales is for float8_e4m3fn, the storage holds torch.float32",
        ),
        ({"dtype": FP8, "key_scales": torch.ones(2, 3)}, r"key_scales is torch.float32 \[2, 3\], it must be"),
        ({"dtype": FP8, "value_scales": torch.ones(2, 2).double()}, "value_scales is torch.float64"),
        ({"dtype": FP8, "value_scales": torch.zeros(2, 2)}, "value_scales has a scale that is not over 0"),
        ({"dtype": FP8, "key_scales": torch.full((2, 2), torch.inf)}, "key_scales has a scale that is not"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make(**arguments)  # type: ignore[arg-type]


def test_int8_elements_that_leave_no_place_for_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="head_size=3: 2 tokens of it must be a multiple of 4"):
        KvStorage(num_blocks=1, num_layers=1, block_size=2, num_kv_heads=1, head_size=3, dtype=torch.int8)


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
def test_evicted_blocks_come_back_bit_for_bit_to_where_they_are_wanted(dtype: torch.dtype) -> None:
    kv = make(dtype, keys_across=False)
    scramble(kv)
    before = bits(kv).clone()
    host = kv.host_blocks(4)
    host.data.fill_(77)
    kv.evict((3, 0), host, (2, 1))
    assert torch.equal(bits(kv), before)
    assert torch.equal(host.data[[2, 1]], before[[3, 0]])
    assert (host.data[[0, 3]] == 77).all()
    scramble(kv, seed=1)
    after = bits(kv).clone()
    kv.restore(host, (1, 2), (4, 3))
    assert torch.equal(bits(kv)[[4, 3]], before[[0, 3]])
    assert torch.equal(bits(kv)[:3], after[:3])
    assert torch.equal(host.data[[2, 1]], before[[3, 0]])


def test_blocks_move_between_pools_of_one_shape() -> None:
    first, second = make(), make(num_blocks=2)
    scramble(first)
    host = first.host_blocks(1)
    first.evict((4,), host, (0,))
    second.restore(host, (0,), (1,))
    assert torch.equal(bits(second)[1], bits(first)[4])
    assert not bits(second)[0].any()


@pytest.mark.parametrize(
    ("blocks", "places", "told"),
    [
        ((0, 5), (0, 1), "block 5 is not in 0..4"),
        ((-1,), (0,), "block -1 is not in 0..4"),
        ((0, 1), (0, 3), "place 3 is not in 0..2"),
        ((1, 0, 1), (0, 1, 2), "block 1 is named twice"),
        ((0, 1), (2, 2), "place 2 is named twice"),
        ((0, 1), (0,), "2 blocks and 1 places"),
    ],
)
def test_a_refused_copy_copies_nothing(blocks: tuple[int, ...], places: tuple[int, ...], told: str) -> None:
    kv = make()
    scramble(kv)
    before, host = bits(kv).clone(), kv.host_blocks(3)
    host.data.fill_(9)
    with pytest.raises(ValueError, match=told):
        kv.evict(blocks, host, places)
    with pytest.raises(ValueError, match=told):
        kv.restore(host, places, blocks)
    assert (host.data == 9).all()
    assert torch.equal(bits(kv), before)


def test_numbers_may_come_in_any_sequence_and_must_be_whole() -> None:
    kv = make()
    scramble(kv)
    before, host = bits(kv).clone(), kv.host_blocks(3)
    host.data.fill_(9)
    with pytest.raises(ValueError, match="block 1 is named twice"):
        kv.evict(torch.tensor([1, 1]), host, (0, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        kv.evict((0, 1.0), host, (0, 1))  # type: ignore[arg-type]
    assert (host.data == 9).all()
    kv.evict(torch.tensor([3, 1]), host, np.array([0, 2]))  # type: ignore[arg-type]
    assert torch.equal(host.data[[0, 2]], before[[3, 1]])
    kv.zero(np.array([], np.int64))  # type: ignore[arg-type]
    kv.zero(np.array([3]))  # type: ignore[arg-type]
    assert not bits(kv)[3].any()


def test_room_for_other_blocks_is_refused() -> None:
    kv, half = make(), make(torch.float16)
    with pytest.raises(ValueError, match="host holds blocks of 512 bytes, the pool's have 1024"):
        kv.evict((0,), half.host_blocks(1), (0,))
    with pytest.raises(ValueError, match="num_blocks=0"):
        kv.host_blocks(0)
    with pytest.raises(ValueError, match="block_bytes=0"):
        HostBlocks(1, 0)


def test_nothing_to_copy_is_nothing() -> None:
    kv = make()
    kv.evict((), kv.host_blocks(1), ())
    kv.restore(kv.host_blocks(1), (), ())
    assert not bits(kv).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_device_room_is_pinned_and_the_streams_order_is_enough() -> None:
    kv = make(torch.bfloat16, keys_across=False, device=torch.device("cuda"))
    scramble_host = torch.randint(0, 256, tuple(bits(kv).shape), dtype=torch.uint8)
    bits(kv).copy_(scramble_host)
    host = kv.host_blocks(5)
    assert host.data.is_pinned()
    kv.evict(range(5), host, range(5))
    kv.zero(range(5))
    kv.restore(host, (4, 3, 2, 1, 0), (0, 1, 2, 3, 4))
    assert torch.equal(bits(kv).cpu(), scramble_host.flip(0))
