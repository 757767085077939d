"""What matrices of a file are kept as."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from tests.tiny_model import write_tiny_gguf
from worker.model.config import ModelFileError
from worker.model.llama import LlamaModel
from worker.model.weights.gguf import open_gguf, read_gguf
from worker.model.weights.quantised import QuantisedMatrix

FORMATS = {
    "token_embd.weight": "Q8_0",
    "blk.0.attn_q.weight": "Q4_0",
    "blk.0.attn_k.weight": "Q4_1",
    "blk.0.attn_v.weight": "F16",
    "blk.0.attn_output.weight": "BF16",
    "blk.0.ffn_gate.weight": "Q5_0",
    "blk.0.ffn_up.weight": "Q5_0",
    "blk.1.ffn_up.weight": "Q5_1",
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(folder / "mixed.gguf", formats=FORMATS)


def plain(path: Path) -> dict[str, Tensor]:
    """Every tensor as the `gguf` package decodes it."""
    return {
        tensor.name: torch.from_numpy(
            np.array(dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type)), dtype=np.float32)
        )
        for tensor in GGUFReader(path).tensors
    }


def test_file_keeps_what_kernels_multiply_and_counts_the_rest(mixed: Path) -> None:
    file, expected = read_gguf(mixed, weights="file"), plain(mixed)
    kinds = {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1"}
    # On a CPU bfloat16 is multiplied as float32.
    dtypes = {"F16": torch.float16, "BF16": torch.float32, "Q5_0": torch.float32, "F32": torch.float32}
    for name, tensor in file.tensors.items():
        kind = FORMATS.get(name, "F32")
        if kind in kinds:
            assert isinstance(tensor, QuantisedMatrix)
            assert tensor.kind == kinds[kind]
            assert torch.equal(tensor.dequantise(), expected[name])
        else:
            assert isinstance(tensor, Tensor)
            assert tensor.dtype == dtypes.get(kind, torch.float32)
            assert torch.equal(tensor.float(), expected[name])
            assert tensor.is_contiguous()
    assert file.dequantised == {"Q5_0": 2, "Q5_1": 1}
    assert file.matrix_kinds == ("float16", "float32", "q4_0", "q4_1", "q8_0")
    assert file.num_parameters == read_gguf(mixed).num_parameters


@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16"])
def test_matrices_are_cast_and_vectors_are_not(weights: str, mixed: Path) -> None:
    file, expected = read_gguf(mixed, weights=weights), plain(mixed)  # type: ignore[arg-type]
    dtype = getattr(torch, weights)
    for name, tensor in file.tensors.items():
        assert isinstance(tensor, Tensor)
        assert tensor.dtype == (dtype if tensor.dim() == 2 else torch.float32)
        assert torch.equal(tensor, expected[name].to(tensor.dtype))
    assert file.dequantised == {}
    assert file.matrix_kinds == (weights,)


def test_what_float16_cannot_hold_is_refused_with_its_name(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "large.gguf", largest={"blk.1.ffn_down.weight": 7e4})
    with pytest.raises(
        ModelFileError, match=r"^large.gguf: tensor blk.1.ffn_down.weight: a weight is over 65504"
    ):
        read_gguf(path, weights="float16")
    assert read_gguf(path, weights="bfloat16").matrix_kinds == ("bfloat16",)


def test_sizes_and_tokenizer_are_known_before_weights_are_read(mixed: Path) -> None:
    source = open_gguf(mixed)
    file = source.read("file")
    assert (source.config, source.tokenizer) == (file.config, file.tokenizer)


def test_a_model_of_such_a_file_ties_and_stacks(tmp_path: Path) -> None:
    formats = dict.fromkeys(("token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight"), "Q8_0")
    path = write_tiny_gguf(tmp_path / "tied.gguf", formats=formats, is_tied=True)
    model = LlamaModel.from_gguf(read_gguf(path, weights="file"))
    head = model.store.matrix(("output.weight",))
    assert isinstance(head, QuantisedMatrix)
    assert head is model.store.matrix(("token_embd.weight",))
    assert model.weights["output.weight"] is model.weights["token_embd.weight"]
    stack = model.store.matrix(("blk.0.attn_q.weight", "blk.0.attn_k.weight"))
    assert isinstance(stack, QuantisedMatrix)
    assert stack.shape == (64 + 32, 64)
    # A part that differs: all of them in one dtype.
    mixed = model.store.matrix(("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"))
    assert isinstance(mixed, Tensor)
    assert (mixed.dtype, mixed.shape) == (torch.float32, (128, 64))
