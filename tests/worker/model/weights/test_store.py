import weakref

import pytest
import torch

from worker.model.weights.store import WeightStore


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make() -> WeightStore:
    embedding = draw(40, 24)
    return WeightStore(
        {
            "embedding": embedding,
            "q": draw(32, 24, seed=1),
            "k": draw(16, 24, seed=2),
            "narrow": draw(16, 8, seed=3),
            "norm": draw(24, seed=4),
            "head": embedding,
        }
    )


def test_a_stack_is_made_once_from_its_parts_in_order():
    store = make()
    stack = store.stacked(("k", "q"))
    assert torch.equal(stack, torch.cat([store.tensors["k"], store.tensors["q"]]))
    assert stack.is_contiguous()
    assert store.stacked(("k", "q")) is stack
    assert store.stacked(("q", "k")) is not stack


def test_a_stack_of_one_is_the_tensor_itself():
    store = make()
    assert store.stacked(("q",)) is store.tensors["q"]
    assert store.stacked(("norm",)) is store.tensors["norm"]


def test_the_mapping_that_was_given_is_not_kept():
    tensors = {"a": draw(16, 16)}
    store = WeightStore(tensors)
    tensors.clear()
    assert store.tensors.keys() == {"a"}


def test_an_unknown_name_is_refused():
    store = make()
    for make_one in (store.stacked, store.packed):
        with pytest.raises(KeyError, match="nothing"):
            make_one(("q", "nothing"))


def test_a_matrix_is_packed_once():
    store = make()
    packed = store.packed(("q", "k"))
    assert (packed.num_rows, packed.num_columns) == (48, 24)
    assert store.packed(("q", "k")) is packed
    assert store.packed(("k", "q")) is not packed
    assert store.packed(("q",)).num_rows == 32


def test_a_tied_head_is_packed_with_its_embedding():
    store = make()
    assert store.packed(("head",)) is store.packed(("embedding",))
    # 40 rows fill two panels of 16 and half of a third.
    assert store.packed_bytes == 48 * 24 * 4


def test_what_is_no_matrix_is_not_packed():
    store = make()
    with pytest.raises(ValueError, match="norm has 1 dimensions"):
        store.packed(("norm",))
    with pytest.raises(ValueError, match="columns"):
        store.packed(("q", "narrow"))
    assert store.packed_bytes == 0


def test_released_matrices_keep_their_shape_and_their_packed_form():
    store = make()
    embedding, stack = store.packed(("embedding",)), store.packed(("q", "k"))
    store.stacked(("q", "k"))
    norm, narrow = store.tensors["norm"], store.tensors["narrow"]
    store.release_plain()
    for name, shape in {"embedding": (40, 24), "head": (40, 24), "q": (32, 24), "k": (16, 24)}.items():
        assert store.tensors[name].is_meta
        assert store.tensors[name].shape == shape
    # Still one weight of two names, and still what nobody packed.
    assert store.tensors["head"] is store.tensors["embedding"]
    assert store.tensors["norm"] is norm
    assert store.stacked(("narrow",)) is narrow
    assert store.packed(("head",)) is embedding
    assert store.packed(("q", "k")) is stack


@pytest.mark.parametrize("parts", [("q",), ("q", "k"), ("k", "narrow")])
def test_a_released_matrix_is_not_stacked(parts):
    store = make()
    store.stacked(("q", "k"))
    store.packed(("q", "k"))
    store.release_plain()
    with pytest.raises(RuntimeError, match=f"{parts[0]}: only its packed form is left"):
        store.stacked(parts)


def test_a_released_matrix_is_not_packed_in_another_stack():
    store = make()
    store.packed(("q", "k"))
    store.release_plain()
    with pytest.raises(RuntimeError, match="q: only its packed form is left"):
        store.packed(("q",))


def test_stacks_are_let_go_with_what_they_were_made_of():
    store = make()
    stack = weakref.ref(store.stacked(("q", "k")))
    matrix = weakref.ref(store.tensors["q"])
    store.packed(("q", "k"))
    assert stack() is not None
    assert matrix() is not None
    store.release_plain()
    assert stack() is None
    assert matrix() is None


def test_releasing_twice_or_with_nothing_packed_is_nothing():
    store = make()
    store.release_plain()
    assert not any(tensor.is_meta for tensor in store.tensors.values())
    packed = store.packed(("q",))
    store.release_plain()
    store.release_plain()
    assert store.packed(("q",)) is packed
