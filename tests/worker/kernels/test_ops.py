"""Schemas and fakes against the references, and the tables of operators."""

import pytest
import torch

from worker.kernels import ops
from worker.kv.storage import KvStorage
from worker.model.rope import rope_tables

NAMES = {
    "embedding",
    "rms_norm",
    "linear",
    "rope",
    "store_kv",
    "paged_attention",
    "swiglu",
    "add",
    "select_rows",
    "columns",
    "add_rms_norm",
    "rope_store",
    "linear_swiglu",
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def arguments() -> dict[str, tuple[torch.Tensor | float, ...]]:
    cos, sin = rope_tables(head_size=16, theta=1e4, max_context_tokens=32)
    kv = KvStorage(num_blocks=3, num_layers=2, block_size=16, num_kv_heads=2, head_size=16)
    caches = (kv.keys[1], kv.values[1])
    index = torch.tensor([0, 2, 1], dtype=torch.int32)
    slots = index.long() + 16
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    context, starts = torch.tensor([20], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    return {
        "embedding": (draw(8, 32), index),
        "rms_norm": (draw(3, 32), draw(32), 1e-5),
        "linear": (draw(3, 32), draw(24, 32)),
        "rope": (draw(3, 64), index, cos, sin),
        "store_kv": (draw(3, 32), draw(3, 32), slots, *caches),
        "paged_attention": (draw(3, 64), *caches, table, context, starts, 0.25),
        "swiglu": (draw(3, 32), draw(3, 32)),
        "add": (draw(3, 32), draw(3, 32)),
        "select_rows": (draw(8, 32), index),
        "columns": (draw(3, 32), 4, 20),
        "add_rms_norm": (draw(3, 32), draw(3, 32), draw(32), 1e-5),
        "rope_store": (draw(3, 64), draw(3, 32), draw(3, 32), index, slots, cos, sin, *caches),
        "linear_swiglu": (draw(3, 32), draw(24, 32)),
    }


@pytest.mark.parametrize("name", sorted(NAMES))
def test_schema_and_fake_agree_with_the_reference(name):
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(ops, name), arguments()[name], test_utils=checks)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_bare_fake_has_the_shapes_of_the_result(name):
    given = arguments()[name]
    result = ops.implementations("reference")[name](*given)
    fake = ops.fake(name)(
        *(value.to("meta") if isinstance(value, torch.Tensor) else value for value in given)
    )
    if result is None:
        assert fake is None
        return
    results, fakes = (value if isinstance(value, tuple) else (value,) for value in (result, fake))
    assert [value.shape for value in results] == [value.shape for value in fakes]


def test_every_operator_has_a_reference():
    assert ops.implementations("reference").keys() == NAMES


def test_operators_that_write_are_known():
    assert {name for name in NAMES if ops.writes(name)} == {"store_kv", "rope_store"}


def test_names_and_overloads():
    assert all(ops.short_name(ops.overload(name)) == name for name in NAMES)
    assert ops.short_name(torch.ops.aten.add.Tensor) is None
    assert ops.short_name("linear") is None
    with pytest.raises(KeyError, match="nothing"):
        ops.overload("nothing")


def test_kernels_that_are_none_are_refused():
    with pytest.raises(ValueError, match="kernels='cuda' is none of native, reference, triton"):
        ops.implementations("cuda")


def test_native_kernels_are_no_functions():
    with pytest.raises(ValueError, match="kernels='native' runs whole programs"):
        ops.implementations("native")
