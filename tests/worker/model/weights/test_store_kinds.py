"""Stores of matrices in other forms than float32."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from worker.model.weights.quantised import QuantisedMatrix, QuantKind
from worker.model.weights.store import WeightStore, product_dtype


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantised(kind: QuantKind, rows: int, *, seed: int) -> QuantisedMatrix:
    raw = quantize(draw(rows, 64, seed=seed).numpy(), GGMLQuantizationType[kind.upper()])
    return QuantisedMatrix.from_gguf(kind, np.array(raw))


def same(one: QuantisedMatrix, other: QuantisedMatrix) -> bool:
    return (one.kind, one.shape) == (other.kind, other.shape) and torch.equal(
        one.dequantise(), other.dequantise()
    )


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_quantised_parts_become_rows_of_their_stack(kind: QuantKind) -> None:
    q, k = quantised(kind, 6, seed=1), quantised(kind, 3, seed=2)
    store = WeightStore({"q": q, "k": k})
    assert store.matrix(("q",)) is q
    stack = store.matrix(("k", "q"))
    assert isinstance(stack, QuantisedMatrix)
    assert torch.equal(stack.dequantise(), torch.cat([k.dequantise(), q.dequantise()]))
    assert store.matrix(("k", "q")) is stack
    for name, matrix in {"q": q, "k": k}.items():
        part = store.matrix((name,))
        assert isinstance(part, QuantisedMatrix)
        assert same(part, matrix)
        # Nothing is held twice.
        storage = part.quants.untyped_storage().data_ptr()
        assert storage == stack.quants.untyped_storage().data_ptr()


def test_quantised_matrices_are_traced_by_their_shape_and_have_no_plain_copy() -> None:
    embedding = quantised("q8_0", 6, seed=1)
    store = WeightStore({"embedding": embedding, "head": embedding, "norm": draw(64, seed=2)})
    assert store.tensors["head"] is store.tensors["embedding"]
    assert (store.tensors["head"].device.type, store.tensors["head"].shape) == ("meta", (6, 64))
    assert store.matrix(("head",)) is store.matrix(("embedding",)) is embedding
    for refuses in (store.stacked, store.packed):
        with pytest.raises(RuntimeError, match="head: it is kept quantised as q8_0"):
            refuses(("head",))
    with pytest.raises(KeyError, match="nothing"):
        store.matrix(("nothing",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_one_dtype_keep_it_and_become_rows_of_their_stack(dtype: torch.dtype) -> None:
    q, k = draw(6, 64, seed=1).to(dtype), draw(3, 64, seed=2).to(dtype)
    store = WeightStore({"q": q, "k": k, "also q": q})
    stack = store.matrix(("q", "k"))
    assert isinstance(stack, Tensor)
    assert stack.dtype == dtype
    assert torch.equal(stack, torch.cat([q, k]))
    assert store.stacked(("q", "k")) is stack
    assert store.matrix(("q",)).data_ptr() == stack.data_ptr()  # type: ignore[union-attr]
    assert store.tensors["also q"] is store.tensors["q"]
    assert torch.equal(store.matrix(("k",)), k)  # type: ignore[arg-type]


def test_parts_of_several_kinds_are_stacked_in_what_the_device_multiplies() -> None:
    q, k, v = quantised("q8_0", 6, seed=1), quantised("q4_0", 3, seed=2), draw(3, 64, seed=3).half()
    store = WeightStore({"q": q, "k": k, "v": v})
    for parts, plain in (
        (("q", "k"), [q.dequantise(), k.dequantise()]),
        (("v", "q"), [v.float(), q.dequantise()]),
    ):
        stack = store.matrix(parts)
        assert isinstance(stack, Tensor)
        assert stack.dtype == product_dtype(torch.device("cpu")) == torch.float32
        assert torch.equal(stack, torch.cat(plain))
        assert store.matrix(parts) is stack
    assert store.matrix(("q",)) is q
    assert product_dtype(torch.device("cuda", 0)) == torch.bfloat16
