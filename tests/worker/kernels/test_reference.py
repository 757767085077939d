"""Each plain operator against its formula in float64, and its rows against themselves in other company."""

import pytest
import torch

from tests.worker.numerics import bits
from worker.kernels.reference.add import add
from worker.kernels.reference.add_rms_norm import add_rms_norm
from worker.kernels.reference.columns import columns
from worker.kernels.reference.linear import linear
from worker.kernels.reference.linear_swiglu import linear_swiglu
from worker.kernels.reference.rms_norm import rms_norm
from worker.kernels.reference.rope import rope
from worker.kernels.reference.rope_store import rope_store
from worker.kernels.reference.select_rows import select_rows
from worker.kernels.reference.store_kv import store_kv
from worker.kernels.reference.swiglu import swiglu
from worker.kv.storage import KvStorage
from worker.model.rope import rope_tables


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """Runs the test on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_rows_stand_alone(operator, *inputs: torch.Tensor) -> None:
    """Each row's bits alone are those among any number of rows, in any order."""
    num_rows = inputs[0].shape[0]
    alone = bits(
        torch.cat([operator(*(x[row : row + 1].clone() for x in inputs)) for row in range(num_rows)])
    )
    for count in (*range(1, 20), 31, 32, 33, num_rows):
        assert torch.equal(bits(operator(*(x[:count].clone() for x in inputs))), alone[:count]), (
            f"{count} rows"
        )
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    assert torch.equal(bits(operator(*(x[order] for x in inputs))), alone[order]), "permuted"


@pytest.mark.parametrize(("out", "inner"), [(576, 1536), (1536, 576), (192, 576), (37, 53), (64, 64)])
def test_linear_rows_stand_alone(out, inner, threads):
    weight = draw(out, inner, seed=1)
    assert_rows_stand_alone(lambda x: linear(x, weight), draw(70, inner))


def test_linear_rows_do_not_see_their_neighbours():
    weight, x = draw(96, 64, seed=1), draw(16, 64)
    poisoned = torch.full((16, 64), float("inf"))
    poisoned[5] = x[0]
    assert torch.equal(bits(linear(poisoned, weight)[5]), bits(linear(x, weight)[0]))


@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 17, 40])
def test_linear_formula(num_rows):
    x, weight = draw(num_rows, 53), draw(37, 53, seed=1)
    torch.testing.assert_close(
        linear(x, weight).double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("width", [53, 576, 1536])
def test_elementwise_rows_stand_alone(width, threads):
    weight = draw(width, seed=1)
    assert_rows_stand_alone(lambda x: rms_norm(x, weight, 1e-5), draw(70, width))
    assert_rows_stand_alone(swiglu, draw(70, width) * 5, draw(70, width, seed=1))


def test_rms_norm_formula():
    x, weight = draw(5, 53), draw(53, seed=1)
    exact = x.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-3).double(), exact, rtol=1e-5, atol=1e-6)


def test_swiglu_formula_up_to_the_ends_of_exp():
    gate = torch.tensor([[-200.0, -88.0, -1.0, 0.0, 1.0, 88.0, 200.0]])
    exact = torch.nn.functional.silu(gate.double()) * 3
    torch.testing.assert_close(
        swiglu(gate, torch.full_like(gate, 3.0)).double(), exact, rtol=1e-5, atol=1e-30
    )


def nan_pool(*, head_size: int = 8, num_kv_heads: int = 2) -> KvStorage:
    kv = KvStorage(num_blocks=4, num_layers=1, block_size=16, num_kv_heads=num_kv_heads, head_size=head_size)
    kv.data.fill_(float("nan"))
    return kv


@pytest.mark.parametrize("with_factors", [False, True])
def test_rope_rotates_pairs(with_factors):
    head_size, theta = 8, 100.0
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0]) if with_factors else None
    cos, sin = rope_tables(head_size=head_size, theta=theta, max_context_tokens=64, frequency_factors=factors)
    x, position = draw(3, 32), torch.tensor([0, 17, 63], dtype=torch.int32)
    frequency = theta ** (-torch.arange(0, head_size, 2).double() / head_size) / (
        factors if with_factors else 1.0
    )
    turn = torch.polar(torch.ones(3, 4).double(), position.double()[:, None] * frequency)[:, None]
    pairs = torch.view_as_complex(x.double().view(3, -1, head_size // 2, 2))
    expected = torch.view_as_real(pairs * turn).flatten(1)
    torch.testing.assert_close(rope(x, position, cos, sin).double(), expected, rtol=1e-5, atol=1e-6)


def test_store_kv_writes_its_slots_and_no_other():
    kv = nan_pool()
    k, v = draw(3, 16, seed=1), draw(3, 16, seed=2)
    store_kv(k, v, torch.tensor([2 * 16 + 5, 0, 3 * 16 + 15]), kv.keys[0], kv.values[0])
    stored = (torch.tensor([2, 0, 3]), torch.tensor([5, 0, 15]))
    assert torch.equal(kv.keys[0][stored], k.view(3, 2, 8))
    assert torch.equal(kv.values[0][stored], v.view(3, 2, 8))
    assert kv.data.isfinite().sum() == 2 * k.numel(), "another slot was written"


def test_rope_store_is_rope_and_store():
    cos, sin = rope_tables(head_size=8, theta=100.0, max_context_tokens=64)
    q, k, v = draw(3, 32), draw(3, 16, seed=1), draw(3, 16, seed=2)
    position = torch.tensor([0, 17, 63], dtype=torch.int32)
    slots = torch.tensor([2 * 16 + 5, 0, 3 * 16 + 15])
    fused, apart = nan_pool(), nan_pool()
    out = rope_store(q, k, v, position, slots, cos, sin, fused.keys[0], fused.values[0])
    store_kv(rope(k, position, cos, sin), v, slots, apart.keys[0], apart.values[0])
    assert torch.equal(bits(out), bits(rope(q, position, cos, sin)))
    assert torch.equal(bits(fused.data), bits(apart.data))
    assert fused.data.isfinite().any()


@pytest.mark.parametrize("num_heads", [1, 3])
def test_rope_rows_stand_alone(num_heads, threads):
    cos, sin = rope_tables(head_size=16, theta=1e4, max_context_tokens=512)
    position = (torch.arange(70, dtype=torch.int32) * 7) % 500
    assert_rows_stand_alone(lambda x, p: rope(x, p, cos, sin), draw(70, num_heads * 16), position)


def test_add_rms_norm_is_add_and_rms_norm():
    x, y, weight = draw(5, 53), draw(5, 53, seed=1), draw(53, seed=2)
    total, normed = add_rms_norm(x, y, weight, 1e-3)
    assert torch.equal(total, x + y)
    assert torch.equal(bits(normed), bits(rms_norm(x + y, weight, 1e-3)))


@pytest.mark.parametrize("width", [53, 576])
def test_add_rms_norm_rows_stand_alone(width, threads):
    weight = draw(width, seed=2)
    for result in (0, 1):
        assert_rows_stand_alone(
            lambda x, y, result=result: add_rms_norm(x, y, weight, 1e-5)[result],
            draw(70, width),
            draw(70, width, seed=1),
        )


def test_linear_swiglu_formula():
    x, weight = draw(5, 53), draw(74, 53, seed=1)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(linear_swiglu(x, weight).double(), exact, rtol=1e-4, atol=1e-4)


def test_linear_swiglu_rows_stand_alone(threads):
    weight = draw(192, 64, seed=1)
    assert_rows_stand_alone(lambda x: linear_swiglu(x, weight), draw(70, 64))


def test_linear_swiglu_refuses_no_two_halves():
    with pytest.raises(ValueError, match="gate_up has 5 rows"):
        linear_swiglu(draw(2, 8), draw(5, 8))


def test_columns_are_a_copy():
    x = draw(3, 8)
    out = columns(x, 0, 8)
    assert torch.equal(out, x)
    out.zero_()
    assert x.count_nonzero() == 24
    assert torch.equal(columns(x, 2, 5), x[:, 2:5])


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (4, 3), (0, 9)])
def test_columns_refuse_another_range(start, end):
    with pytest.raises(ValueError, match=rf"columns {start}\.\.{end} are not in 0\.\.8"):
        columns(draw(3, 8), start, end)


def test_strided_rows_have_the_same_bits():
    """Values in an arena have rows that are further apart than their width."""

    def strided(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((x.shape[0], x.shape[1] + 11), float("nan"))
        wide[:, 5:-6] = x
        return wide[:, 5:-6]

    x, y, weight = draw(37, 48), draw(37, 48, seed=1), draw(48, seed=2)
    matrix = draw(64, 48, seed=3)
    cos, sin = rope_tables(head_size=16, theta=1e4, max_context_tokens=64)
    index = torch.arange(37, dtype=torch.int32)
    operators = {
        "linear": lambda x, _: linear(x, matrix),
        "linear_swiglu": lambda x, _: linear_swiglu(x, matrix),
        "rms_norm": lambda x, _: rms_norm(x, weight, 1e-5),
        "add": add,
        "add_rms_norm": lambda x, y: add_rms_norm(x, y, weight, 1e-5)[1],
        "swiglu": swiglu,
        "rope": lambda x, _: rope(x, index, cos, sin),
        "select_rows": lambda x, _: select_rows(x, index),
        "columns": lambda x, _: columns(x, 3, 20),
    }
    for name, operator in operators.items():
        assert torch.equal(bits(operator(strided(x), strided(y))), bits(operator(x, y))), name
    dense, apart = nan_pool(head_size=16, num_kv_heads=3), nan_pool(head_size=16, num_kv_heads=3)
    store_kv(x, y, index.long(), dense.keys[0], dense.values[0])
    store_kv(strided(x), strided(y), index.long(), apart.keys[0], apart.values[0])
    assert torch.equal(bits(dense.data), bits(apart.data))


def test_rope_tables_refuse_bad_sizes():
    with pytest.raises(ValueError, match="head_size=7"):
        rope_tables(head_size=7, theta=1e4, max_context_tokens=4)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        rope_tables(head_size=8, theta=1e4, max_context_tokens=4, frequency_factors=torch.ones(3))
