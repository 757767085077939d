"""Quantised matrices against the `gguf` package, bit for bit, and what they refuse."""

import dataclasses

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from worker.model.weights.quantised import QUANT_KINDS, QuantisedMatrix, QuantKind


def draw_raw(kind: QuantKind, num_rows: int, width: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((num_rows, width), dtype=np.float32)
    return quantize(values, GGMLQuantizationType[kind.upper()])


def make(kind: QuantKind, num_rows: int = 5, width: int = 96, seed: int = 0) -> QuantisedMatrix:
    return QuantisedMatrix.from_gguf(kind, draw_raw(kind, num_rows, width, seed))


@pytest.mark.parametrize("kind", QUANT_KINDS)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 32), (5, 96), (64, 576)])
def test_dequantises_as_gguf_does(kind, num_rows, width):
    raw = draw_raw(kind, num_rows, width)
    expected = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind.upper()]))
    matrix = QuantisedMatrix.from_gguf(kind, raw)
    assert matrix.shape == (num_rows, width)
    assert torch.equal(matrix.dequantise().view(torch.int32), expected.view(torch.int32))
    span = 64 if kind == "q8_0" else 128
    assert matrix.num_bytes * width == raw.nbytes * -(-width // span) * span
    from_tensor = QuantisedMatrix.from_gguf(kind, torch.from_numpy(raw))
    assert torch.equal(from_tensor.quants.view(torch.int16), matrix.quants.view(torch.int16))


@pytest.mark.parametrize("kind", QUANT_KINDS)
def test_every_pattern_of_bits_is_kept(kind):
    """Groups of random bytes, not only those that a quantiser writes; scales are kept finite."""
    raw = np.random.default_rng(1).integers(0, 256, draw_raw(kind, 40, 256).shape, dtype=np.uint8)
    raw[:, 1 :: raw.shape[1] // 8] &= 0xBF
    if kind == "q4_1":
        raw[:, 3 :: raw.shape[1] // 8] &= 0xBF
    expected = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind.upper()]))
    found = QuantisedMatrix.from_gguf(kind, raw).dequantise()
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kind", QUANT_KINDS)
def test_keeps_no_hold_of_the_file(kind):
    raw = draw_raw(kind, 3, 64)
    matrix = QuantisedMatrix.from_gguf(kind, raw)
    before = matrix.dequantise()
    raw[:] = 0
    assert torch.equal(matrix.dequantise(), before)


@pytest.mark.parametrize("kind", QUANT_KINDS)
def test_stacks_and_takes_rows(kind):
    first, second = make(kind, 3), make(kind, 4, seed=1)
    whole = torch.cat([first.dequantise(), second.dequantise()])
    stack = QuantisedMatrix.stack([first, second])
    assert stack.shape == (7, 96)
    assert torch.equal(stack.dequantise(), whole)
    assert QuantisedMatrix.stack([first]) is first
    rows = torch.tensor([6, 0, 0], dtype=torch.int32)
    assert torch.equal(stack.take(rows).dequantise(), whole[rows])
    assert stack.to("cpu") is stack
    assert stack.to("meta").device == torch.device("meta")
    with pytest.raises(ValueError, match="of width 64 on cpu below"):
        QuantisedMatrix.stack([first, make(kind, width=64)])
    with pytest.raises(ValueError, match="parts: there are none"):
        QuantisedMatrix.stack([])


def test_kinds_are_not_mixed():
    with pytest.raises(ValueError, match="q4_1 of width 96 on cpu below q4_0"):
        QuantisedMatrix.stack([make("q4_0"), make("q4_1")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "q5_0"}, "kind='q5_0' is none of q8_0, q4_0, q4_1"),
        ({"kind": "q4_1"}, "mins: kind q4_1 has some"),
        ({"kind": "q8_0"}, r"quants is \[5, 32\] torch.uint16, q8_0 \(5, 96\) has a contiguous \[5, 64\]"),
        ({"shape": (5, 90)}, "whole groups of 32"),
        ({"shape": (5, 160)}, r"quants is \[5, 32\]"),
        ({"scales": torch.zeros(5, 3)}, r"scales is \[5, 3\] torch.float32"),
        ({"scales": torch.zeros(5, 8, dtype=torch.float16)[:, ::2]}, "contiguous"),
        ({"scales": torch.zeros(5, 4, dtype=torch.float16, device="meta")}, "scales is on meta"),
        ({"mins": torch.zeros(5, 4, dtype=torch.float16)}, "mins: kind q4_0 has none"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make("q4_0"), **change)


@pytest.mark.parametrize(
    ("kind", "raw", "message"),
    [
        ("q6_k", np.zeros((2, 18), np.uint8), "kind='q6_k' is none of"),
        ("q4_0", np.zeros((2, 20), np.uint8), "rows of 20 bytes, a group of q4_0 has 18"),
        ("q4_0", np.zeros(18, np.uint8), "a matrix of uint8"),
        ("q4_0", np.zeros((0, 18), np.uint8), "a matrix of uint8"),
        ("q4_0", np.zeros((2, 18), np.int8), "a matrix of uint8"),
    ],
)
def test_bytes_that_are_no_groups_are_refused(kind, raw, message):
    with pytest.raises(ValueError, match=message):
        QuantisedMatrix.from_gguf(kind, raw)
