"""Stores of matrices that lie in a file: what is packed, in which format, and when the file is closed."""

import gc
import mmap
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_model import write_tiny_gguf
from worker.model.config import ModelFileError
from worker.model.weights.convert import WeightFormat
from worker.model.weights.file_matrix import FileMatrix
from worker.model.weights.gguf import read_gguf
from worker.model.weights.store import WeightStore

Q, K, V = (f"blk.0.attn_{part}.weight" for part in "qkv")
GATE, UP = "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"
MIXED = {Q: "Q4_0", K: "Q4_0", V: "Q8_0", GATE: "Q5_1", UP: "Q5_0", "token_embd.weight": "Q4_1"}


def store_of(path: Path, weights: WeightFormat = "file") -> WeightStore:
    tensors = read_gguf(path, weights=weights, multiplier="panels").tensors
    return WeightStore({**tensors, "head": tensors["token_embd.weight"]})


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", formats=MIXED)


def test_matrices_of_a_file_are_traced_by_their_shape_and_have_no_plain_copy(mixed: Path) -> None:
    store = store_of(mixed)
    assert store.tensors["head"] is store.tensors["token_embd.weight"]
    assert (store.tensors[UP].device.type, store.tensors[UP].shape) == ("meta", (128, 64))
    for refuses in (store.stacked, store.matrix):
        with pytest.raises(RuntimeError, match=rf"{UP}: it lies in its file as q5_0, there is no plain copy"):
            refuses((UP,))


def test_a_stack_keeps_the_formats_of_its_parts(mixed: Path) -> None:
    store = store_of(mixed)
    packed = store.packed((Q, K, V))
    assert (packed.num_rows, packed.num_columns) == (128, 64)
    assert packed.formats == ("q4_0", "q8_0")
    assert packed.is_quantised
    assert packed.num_bytes == 64 // 32 * (96 * 18 + 32 * 34)
    assert store.packed((Q, K, V)) is packed
    assert store.packed(("head",)) is store.packed(("token_embd.weight",))
    assert store.widened == ()


def test_parts_that_are_read_side_by_side_get_one_format(mixed: Path) -> None:
    store = store_of(mixed)
    apart = store.packed((GATE, UP))
    assert apart.formats == ("q5_1", "q5_0")
    pair = store.packed((GATE, UP), wants_one_format=True)
    assert (pair.formats, pair.is_quantised, pair.num_bytes) == (("f32",), False, 256 * 64 * 4)
    assert store.packed((GATE, UP), wants_one_format=True) is pair
    assert store.packed((GATE, UP)) is apart
    assert store.widened == ((GATE, UP),)
    assert store.packed((Q, K), wants_one_format=True).formats == ("q4_0",)


def test_a_part_that_does_not_end_with_its_panel_widens_the_stack(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", formats=MIXED, intermediate_size=72)
    store = store_of(path)
    assert store.packed((GATE, UP)).formats == ("f32",)
    assert store.widened == ((GATE, UP),)
    assert store.packed((UP,)).formats == ("q5_0",)


@pytest.mark.parametrize(("weights", "num_bytes"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_one_float_for_all_is_no_reason_to_widen(weights: WeightFormat, num_bytes: int, mixed: Path) -> None:
    store = store_of(mixed, weights)
    packed = store.packed((GATE, UP), wants_one_format=True)
    assert packed.num_bytes == 256 * 64 * num_bytes
    assert not packed.is_quantised
    assert store.widened == ()


def test_what_does_not_fit_float16_is_told_and_nothing_is_packed(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", largest={UP: 7e4})
    store = store_of(path, "float16")
    with pytest.raises(ModelFileError, match=UP):
        store.packed((GATE, UP))
    assert store.packed_bytes == 0


def test_vectors_and_matrices_of_other_widths_are_refused(mixed: Path) -> None:
    store = store_of(mixed)
    with pytest.raises(ValueError, match=r"output_norm.weight has 1 dimensions"):
        store.packed(("output_norm.weight",))
    with pytest.raises(ValueError, match="columns"):
        store.packed((UP, "blk.0.ffn_down.weight"))
    with pytest.raises(KeyError, match="nothing"):
        store.packed((UP, "nothing"))
    assert store.packed_bytes == 0


def test_tensors_and_matrices_of_a_file_are_packed_together(mixed: Path) -> None:
    matrix = read_gguf(mixed, weights="float32", multiplier="panels").tensors[UP]
    assert isinstance(matrix, FileMatrix)
    store = WeightStore({"here": torch.ones(16, 64), "there": matrix})
    assert store.packed(("here", "there"), wants_one_format=True).formats == ("f32",)
    assert store.widened == ()


def test_the_file_is_closed_when_all_that_lies_in_it_is_packed_and_released(mixed: Path) -> None:
    store = store_of(mixed)
    owner: object = store._files[UP].raw
    while not isinstance(owner, mmap.mmap):
        assert isinstance(owner, np.ndarray)
        owner = owner.base
    is_open = weakref.ref(owner)
    del owner
    matrices = [name for name, tensor in store.tensors.items() if name != "head" and tensor.dim() == 2]
    for name in matrices[1:]:
        store.packed((name,))
    store.release_plain()
    gc.collect()
    assert is_open() is not None  # one is not packed yet
    packed = store.packed((matrices[0],))
    store.release_plain()
    gc.collect()
    assert is_open() is None
    assert store.packed((matrices[0],)) is packed
    with pytest.raises(RuntimeError, match=f"{GATE}: only its packed form is left"):
        store.packed((GATE, Q))
