"""Each plain operator against its formula in float64, and its rows against themselves in other company."""

import pytest
import torch

from tests.worker.numerics import bits
from worker.kernels import ops
from worker.kernels.reference.linear import linear
from worker.kernels.reference.rms_norm import rms_norm
from worker.kernels.reference.rope_store import rope_store
from worker.kernels.reference.swiglu import swiglu
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


@pytest.mark.parametrize("with_factors", [False, True])
def test_rope_rotates_pairs_and_stores_in_slots(with_factors):
    head_size, theta = 8, 100.0
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0]) if with_factors else None
    cos, sin = rope_tables(head_size=head_size, theta=theta, max_context_tokens=64, frequency_factors=factors)
    pool = torch.full((4, 1, 2, 16, 2, head_size), float("nan"))
    keys, values = pool[:, 0, 0], pool[:, 0, 1]
    q, k, v = draw(3, 32), draw(3, 16, seed=1), draw(3, 16, seed=2)
    position = torch.tensor([0, 17, 63], dtype=torch.int32)
    slots = torch.tensor([2 * 16 + 5, 0, 3 * 16 + 15])
    out = rope_store(q, k, v, position, slots, cos, sin, keys, values)

    frequency = theta ** (-torch.arange(0, head_size, 2).double() / head_size) / (
        factors if with_factors else 1.0
    )
    turn = torch.polar(torch.ones(3, 4).double(), position.double()[:, None] * frequency)[:, None]

    def rotated(x):
        pairs = torch.view_as_complex(x.double().view(3, -1, head_size // 2, 2))
        return torch.view_as_real(pairs * turn).flatten(2)

    torch.testing.assert_close(out.double(), rotated(q).flatten(1), rtol=1e-5, atol=1e-6)
    stored = (torch.tensor([2, 0, 3]), torch.tensor([5, 0, 15]))
    torch.testing.assert_close(keys[stored].double(), rotated(k), rtol=1e-5, atol=1e-6)
    assert torch.equal(values[stored], v.view(3, 2, head_size))
    assert pool.isfinite().sum() == 2 * k.numel(), "another slot was written"


def test_rope_tables_refuse_bad_sizes():
    with pytest.raises(ValueError, match="head_size=7"):
        rope_tables(head_size=7, theta=1e4, max_context_tokens=4)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        rope_tables(head_size=8, theta=1e4, max_context_tokens=4, frequency_factors=torch.ones(3))


def operator_arguments() -> dict[str, tuple[torch.Tensor | float, ...]]:
    cos, sin = rope_tables(head_size=16, theta=1e4, max_context_tokens=32)
    pool = torch.zeros(3, 2, 2, 16, 2, 16)
    caches = (pool[:, 1, 0], pool[:, 1, 1])
    index = torch.tensor([0, 2, 1], dtype=torch.int32)
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    context, starts = torch.tensor([20], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    return {
        "embedding": (draw(8, 32), index),
        "select_rows": (draw(8, 32), index),
        "rms_norm": (draw(3, 32), draw(32), 1e-5),
        "linear": (draw(3, 32), draw(24, 32)),
        "add": (draw(3, 32), draw(3, 32)),
        "swiglu": (draw(3, 32), draw(3, 32)),
        "rope_store": (draw(3, 64), draw(3, 32), draw(3, 32), index, index.long() + 16, cos, sin, *caches),
        "paged_attention": (draw(3, 64), *caches, table, context, starts, 0.25),
    }


@pytest.mark.parametrize("name", operator_arguments())
def test_schema_and_fake_agree_with_the_reference(name):
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(ops, name), operator_arguments()[name], test_utils=checks)
    assert f"pagecast.{name}" in ops.implementations("reference")
