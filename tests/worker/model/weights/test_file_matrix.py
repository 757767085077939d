"""Matrices that stay in their mapped file until they are packed."""

import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from tests.tiny_model import write_tiny_gguf
from worker.model.config import ModelFileError
from worker.model.weights.convert import WeightFormat
from worker.model.weights.file_matrix import PACKED_KINDS, FileMatrix
from worker.model.weights.gguf import GgufFile, open_gguf, read_gguf

UP = "blk.0.ffn_up.weight"
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 16, "num_kv_heads": 4}


def read(path: Path, weights: WeightFormat = "file") -> GgufFile:
    return read_gguf(path, weights=weights, multiplier="panels")


def matrix_of(file: GgufFile, name: str = UP) -> FileMatrix:
    matrix = file.tensors[name]
    assert isinstance(matrix, FileMatrix)
    return matrix


def map_of(matrix: FileMatrix) -> mmap.mmap:
    owner: object = matrix.raw
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert isinstance(owner, mmap.mmap)
    return owner


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_every_kind_of_native_kernels_stays_as_the_file_has_it(kind: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", formats=kind.upper(), **SIZES)
    file, plain = read(path), read_gguf(path)
    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    assert file.matrix_kinds == (names.get(kind, kind),)
    assert file.dequantised == {}
    assert (file.num_parameters, file.fingerprint) == (plain.num_parameters, plain.fingerprint)
    (source,) = (tensor for tensor in GGUFReader(path).tensors if tensor.name == UP)
    matrix = matrix_of(file)
    assert matrix.packable()[0] == kind
    assert matrix.packable()[1] is matrix.raw
    assert matrix.raw.tobytes() == source.data.tobytes()
    assert torch.equal(matrix.dequantise(), plain.tensors[UP])  # type: ignore[arg-type]
    assert not matrix.raw.flags.writeable
    assert len(map_of(matrix)) == path.stat().st_size  # a view of the file, not a copy
    norm = file.tensors["output_norm.weight"]
    assert torch.equal(norm, plain.tensors["output_norm.weight"])  # type: ignore[arg-type]


def test_other_kinds_are_to_be_bfloat16_and_counted(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", formats={UP: "TQ1_0"}, **SIZES)
    file = read(path)
    assert file.dequantised == {"TQ1_0": 1}
    assert file.matrix_kinds == ("bfloat16", "float32")
    kind, raw = matrix_of(file).packable()
    values = read_gguf(path).tensors[UP].to(torch.bfloat16)  # type: ignore[call-overload]
    assert (kind, raw.shape) == ("bf16", (256, 512))
    assert torch.equal(torch.from_numpy(raw).view(torch.bfloat16), values)
    assert read(path, "float32").dequantised == {}


@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16"])
def test_what_was_asked_for_is_what_is_packed(weights: WeightFormat, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", formats="Q4_1")
    file = read(path, weights)
    assert file.matrix_kinds == (weights,)
    dtype = getattr(torch, weights)
    _, raw = matrix_of(file).packable()
    values = read_gguf(path).tensors[UP]
    assert torch.equal(torch.from_numpy(raw).view(dtype), values.to(dtype))  # type: ignore[call-overload]


def test_a_weight_too_large_for_float16_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", largest={UP: 65520.0})
    matrix = matrix_of(read(path, "float16"))
    with pytest.raises(ModelFileError, match=rf"^tensor {UP}: a weight is over 65504"):
        matrix.packable()
    matrix_of(read(path, "bfloat16")).packable()


def resident_pages(matrix: FileMatrix) -> int:
    """Pages of the file's map that this process holds."""
    start = np.frombuffer(map_of(matrix), np.uint8).ctypes.data
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(f"{start:x}-"):
            return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024
    raise AssertionError("the map is not there")


def test_pages_that_were_read_are_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", hidden_size=512, intermediate_size=4096)
    matrix = matrix_of(read(path))
    expected = matrix.dequantise()
    before = resident_pages(matrix)
    assert before >= matrix.raw.nbytes
    matrix.forget()
    assert resident_pages(matrix) <= before - matrix.raw.nbytes + 2 * mmap.PAGESIZE
    assert torch.equal(matrix.dequantise(), expected)


def test_what_is_no_such_matrix_is_refused(tmp_path: Path) -> None:
    raw = np.zeros((2, 36), np.uint8)
    FileMatrix("w", "q4_0", (2, 64), raw, "q4_0")
    for kind, shape, data, packed_as, told in (
        ("q4_0", (2, 64), raw, "q8_0", "packed_as='q8_0': q4_0 is packed as it lies or as a float"),
        ("q2_k", (2, 256), raw, "q2_k", "packed_as='q2_k'"),
        ("q4_0", (2, 32), raw, "q4_0", r"raw is \[2, 36\] uint8, q4_0 \[2, 32\] has \[2, 18\] uint8"),
        ("q4_0", (2, 65), raw, "q4_0", "raw is"),
        ("q4_0", (2, 64), raw.view(np.int8), "q4_0", "int8, q4_0"),
    ):
        with pytest.raises(ValueError, match=told):
            FileMatrix("w", kind, shape, data, packed_as)  # type: ignore[arg-type]


def test_a_kind_that_nobody_decodes_is_refused_before_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", formats={UP: "TQ1_0"}, **SIZES)
    opened = open_gguf(path)

    def refuse(data: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
        if kind == GGMLQuantizationType.TQ1_0:
            raise NotImplementedError
        return dequantize(data, kind)

    monkeypatch.setattr("worker.model.weights.file_matrix.dequantize", refuse)
    with pytest.raises(ModelFileError, match=rf"^tiny.gguf: tensor {re.escape(UP)}: type TQ1_0 cannot be"):
        opened.read("file", multiplier="panels")


def test_panels_are_packed_on_the_cpu(tmp_path: Path) -> None:
    opened = open_gguf(write_tiny_gguf(tmp_path / "tiny.gguf"))
    with pytest.raises(ValueError, match="device=cuda:0: panels are packed on the CPU"):
        opened.read("file", torch.device("cuda", 0), "panels")
