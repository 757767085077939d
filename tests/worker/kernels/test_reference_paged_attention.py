from dataclasses import replace

import pytest
import torch

from tests.worker.kernels.attention_cases import ODD_SHAPES, AttentionCase, make_case, plain_attention
from tests.worker.numerics import bits
from worker.kernels.reference.paged_attention import paged_attention
from worker.kernels.reference.store_kv import round_to_int8, store_kv
from worker.kv.storage import KvStorage


def attend(case: AttentionCase) -> torch.Tensor:
    return paged_attention(*case.arguments())


def part(case: AttentionCase, row: int, first: int, count: int, *, width: int | None = None) -> AttentionCase:
    """The case's queries `first` to `first + count - 1` of one row, as a row of their own."""
    start, end = case.query_start[row : row + 2].tolist()
    return AttentionCase(
        q=case.q[start + first : start + first + count],
        key_cache=case.key_cache,
        value_cache=case.value_cache,
        block_table=case.block_table[row : row + 1, :width],
        context_len=case.context_len[row : row + 1] - (end - start) + first + count,
        query_start=torch.tensor([0, count], dtype=torch.int32),
        scale=case.scale,
    )


@pytest.mark.parametrize("head_size", [16, 64, 80])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_matches_plain_attention(shape, group, head_size):
    case = make_case(ODD_SHAPES[shape], group=group, head_size=head_size)
    torch.testing.assert_close(attend(case).double(), plain_attention(case), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("group", [1, 3, 9])
@pytest.mark.parametrize("head_size", [16, 64, 80])
def test_a_query_has_the_same_bits_in_any_company(group, head_size):
    rows = [(90, 90), (1, 1), (200, 70), (33, 1), (17, 2)]
    case = make_case(rows, group=group, head_size=head_size)
    together = bits(attend(case))
    for row, (_, count) in enumerate(rows):
        start = int(case.query_start[row])
        mine = together[start : start + count]
        assert torch.equal(bits(attend(part(case, row, 0, count))), mine), f"row {row} alone"
        for chunk in (1, 3, 16, 23):
            chunks = [
                attend(part(case, row, first, min(chunk, count - first))) for first in range(0, count, chunk)
            ]
            assert torch.equal(bits(torch.cat(chunks)), mine), f"row {row} in chunks of {chunk}"
        needed = -(-int(case.context_len[row]) // 16)
        assert torch.equal(bits(attend(part(case, row, 0, count, width=needed))), mine), "narrow block table"


def test_a_query_has_the_same_bits_in_any_order_and_on_any_threads():
    rows = [(90, 20), (1, 1), (200, 7), (33, 1)]
    case = make_case(rows, group=3, head_size=64)
    together = attend(case)
    order = [2, 0, 3, 1]
    starts = case.query_start.tolist()
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in order])
    permuted = AttentionCase(
        q=case.q[tokens],
        key_cache=case.key_cache,
        value_cache=case.value_cache,
        block_table=case.block_table[order],
        context_len=case.context_len[order],
        query_start=torch.tensor([0] + [rows[row][1] for row in order]).cumsum(0).to(torch.int32),
        scale=case.scale,
    )
    assert torch.equal(bits(attend(permuted)), bits(together[tokens]))
    num_threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(bits(attend(case)), bits(together)), f"{count} threads"
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("max_pairs", [1, 7, 10**6])
def test_bits_do_not_depend_on_how_many_pairs_go_together(max_pairs, monkeypatch):
    case = make_case([(90, 20), (300, 300), (33, 1)], group=3, head_size=64)
    expected = bits(attend(case))
    monkeypatch.setattr("worker.kernels.reference.paged_attention.MAX_PAIRS", max_pairs)
    assert torch.equal(bits(attend(case)), expected)


def test_large_scores_stay_finite():
    case = make_case([(40, 40)], group=3, head_size=64)
    case.q.mul_(1e4)
    torch.testing.assert_close(attend(case).double(), plain_attention(case), rtol=1e-3, atol=1e-3)


def test_rows_without_tokens_change_no_bit_of_others():
    rows = [(90, 5), (1, 1), (33, 1)]
    case = make_case(rows, group=3, head_size=64)
    spread = make_case([(8, 0), rows[0], (0, 0), rows[1], rows[2], (40, 0)], group=3, head_size=64)
    live = torch.tensor([1, 3, 4])
    among = AttentionCase(
        q=case.q,
        key_cache=case.key_cache,
        value_cache=case.value_cache,
        block_table=spread.block_table.index_copy(0, live, case.block_table),
        context_len=spread.context_len.index_copy(0, live, case.context_len),
        query_start=spread.query_start,
        scale=case.scale,
    )
    assert torch.equal(bits(attend(among)), bits(attend(case)))


def test_a_strided_query_has_the_same_bits():
    case = make_case(ODD_SHAPES["ragged"], group=3, head_size=64)
    wide = torch.cat((case.q, torch.full_like(case.q, float("nan"))), dim=1)
    strided = wide[:, : case.q.shape[1]]
    assert not strided.is_contiguous()
    assert torch.equal(bits(paged_attention(strided, *case.arguments()[1:])), bits(attend(case)))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_only_rows_without_tokens(num_rows):
    case = make_case([(5, 0)] * num_rows, group=1, head_size=16)
    assert attend(case).shape == (0, 32)


def test_no_rows():
    case = make_case([(3, 3)], group=1, head_size=16)
    empty = paged_attention(
        case.q[:0],
        case.key_cache,
        case.value_cache,
        case.block_table[:0],
        case.context_len[:0],
        torch.zeros(1, dtype=torch.int32),
        case.scale,
    )
    assert empty.shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 3.0), (7, 0.0), (16, 2.0)])
def test_windows_soft_caps_and_narrow_caches(dtype, window, soft_cap):
    case = make_case(
        ODD_SHAPES["ragged"], group=3, head_size=16, dtype=dtype, window=window, soft_cap=soft_cap
    )
    mine = paged_attention(*case.arguments(), **case.options())
    torch.testing.assert_close(mine.double(), plain_attention(case), rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_an_int8_cache_is_its_elements_times_their_tokens_scales(shape):
    case = make_case(ODD_SHAPES[shape], group=3, head_size=16)
    keys, key_scale = round_to_int8(case.key_cache.flatten(0, 1))
    values, value_scale = round_to_int8(case.value_cache.flatten(0, 1))
    lead = case.key_cache.shape[:3]
    arguments = case.arguments()
    mine = paged_attention(
        arguments[0],
        keys.view(*lead, -1),
        values.view(*lead, -1),
        *arguments[3:],
        key_scale=key_scale.view(lead),
        value_scale=value_scale.view(lead),
    )
    widened = replace(
        case,
        key_cache=keys.view(*lead, -1) * key_scale.view(*lead, 1),
        value_cache=values.view(*lead, -1) * value_scale.view(*lead, 1),
    )
    torch.testing.assert_close(mine.double(), plain_attention(widened), rtol=1e-5, atol=2e-6)


def test_the_int8_store_writes_elements_and_scales_of_its_slots_alone():
    kv = KvStorage(num_blocks=3, num_layers=2, block_size=16, num_kv_heads=2, head_size=16, dtype=torch.int8)
    assert kv.key_scales is not None
    assert kv.value_scales is not None
    k, v = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    k[1, :16] = 0.0
    k[2, 3] = torch.inf
    v[0, 20] = torch.nan
    slots = torch.tensor([33, 5, -1, 16])
    scales = {"key_scale": kv.key_scales[1], "value_scale": kv.value_scales[1]}
    store_kv(k, v, slots, kv.keys[1], kv.values[1], **scales)
    for token, slot in ((0, 33), (1, 5), (3, 16)):
        for x, cache, scale in ((k, kv.keys, kv.key_scales), (v, kv.values, kv.value_scales)):
            for head in range(2):
                vector = x[token, head * 16 : head * 16 + 16]
                mine, factor = cache[1][slot // 16, slot % 16, head], scale[1][slot // 16, slot % 16, head]
                if not vector.isfinite().all():
                    assert factor.isnan()
                    assert not mine.any()
                    continue
                assert factor == vector.abs().max() / 127
                assert (mine * factor - vector).abs().max() <= factor * 0.5001
    assert not kv.data[:, 0].any()
    written = torch.zeros(3, 16, dtype=torch.bool)
    written.view(-1)[[33, 5, 16]] = True
    assert not kv.values[1][~written].any()
    with pytest.raises(ValueError, match="int8 cache needs key_scale"):
        store_kv(k, v, slots, kv.keys[1], kv.values[1])
