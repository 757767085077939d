"""Packed weights as Python sees them, against GGUF's own dequantisation."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pagecast_native
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from pagecast_native import GgufPart, PackedMatrix

QUANTISED = {
    name: GGMLQuantizationType[name.upper()]
    for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
}
HALVES = {
    "q6_k": (208,),
    "q4_0": (0,),
    "q5_0": (0,),
    "q8_0": (0,),
}  # where a block's float16 lie, else 0 and 2
COLUMNS = 512


def random_rows(kind: str, num_rows: int, seed: int) -> NDArray[np.uint8]:
    """Rows of random blocks whose scales are finite."""
    random = np.random.default_rng(seed)
    columns, size = GGML_QUANT_SIZES[QUANTISED[kind]]
    blocks = random.integers(0, 256, (num_rows, COLUMNS // columns, size), dtype=np.uint8)
    for offset in HALVES.get(kind, (0, 2)):
        halves = random.normal(0, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[..., offset : offset + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def rows_of(packed: PackedMatrix) -> NDArray[np.float32]:
    """Every row, fetched by a program's embedding."""
    n, width = packed.num_rows, packed.num_columns
    ids, arena = np.arange(n, dtype=np.int32), np.zeros(n * width, np.float32)
    program = pagecast_native.Program(pagecast_native.Team(1), max_tokens=n, max_rows=1)
    program.embedding(packed, ids, pagecast_native.View(arena, 0, width, width, "T"))
    program.run(n, 1, 0)
    return arena.reshape(n, width)


def product(packed: PackedMatrix, x: NDArray[np.float32], activations: str) -> NDArray[np.float32]:
    """`x @ packed.T` by a program."""
    (n, width), outputs = x.shape, packed.num_rows
    stride = -(-outputs // 16) * 16
    arena = np.zeros(n * (width + stride), np.float32)
    arena[: n * width] = x.reshape(-1)
    program = pagecast_native.Program(
        pagecast_native.Team(1),
        max_tokens=n,
        max_rows=1,
        activations="int8" if activations == "int8" else "float32",
    )
    program.linear(
        pagecast_native.View(arena, 0, width, width, "T"),
        packed,
        pagecast_native.View(arena, n * width, stride, outputs, "T"),
    )
    program.run(n, 1, 0)
    assert program.activations == activations
    assert program.num_launches == len(program.launch_ns) == 1
    return arena[n * width :].reshape(n, stride)[:, :outputs]


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_weight_is_what_gguf_says(kind: str) -> None:
    data = random_rows(kind, 37, seed=1)
    packed = PackedMatrix([GgufPart(kind, data)])
    expected = dequantize(data, QUANTISED[kind])
    assert packed.formats == (kind,)
    assert packed.is_quantised
    assert (packed.num_rows, packed.num_columns) == expected.shape
    np.testing.assert_array_equal(rows_of(packed), expected)
    x = np.random.default_rng(2).normal(size=(5, COLUMNS)).astype(np.float32)
    plain = product(PackedMatrix([expected]), x, "float32")
    np.testing.assert_array_equal(product(packed, x, "float32").view(np.uint32), plain.view(np.uint32))


@pytest.mark.parametrize("kind", QUANTISED)
def test_eight_bits_are_near(kind: str) -> None:
    packed = PackedMatrix([GgufPart(kind, random_rows(kind, 48, seed=3))])
    x = np.random.default_rng(4).normal(size=(3, COLUMNS)).astype(np.float32)
    exact, rounded = product(packed, x, "float32"), product(packed, x, "int8")
    assert 0 < np.linalg.norm(rounded - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("f32", np.float32)])
def test_numbers_stay_what_they_are(kind: str, dtype: type[np.float16 | np.float32]) -> None:
    values: NDArray[np.float16 | np.float32] = np.random.default_rng(5).normal(size=(20, 33)).astype(dtype)
    packed = PackedMatrix([GgufPart(kind, values.view(np.uint8))])
    assert not packed.is_quantised
    assert packed.num_bytes < 32 * 34 * values.itemsize
    ids, arena = np.arange(20, dtype=np.int32), np.zeros(20 * 48, np.float32)
    program = pagecast_native.Program(pagecast_native.Team(1), max_tokens=20, max_rows=1)
    program.embedding(packed, ids, pagecast_native.View(arena, 0, 48, 33, "T"))
    program.run(20, 1, 0)
    np.testing.assert_array_equal(arena.reshape(20, 48)[:, :33], values.astype(np.float32))


def test_kinds_stack_in_segments_from_a_mapped_file(tmp_path: Path) -> None:
    first, second = random_rows("q4_k", 32, seed=6), random_rows("q6_k", 9, seed=7)
    (tmp_path / "first").write_bytes(first.tobytes())
    mapped = np.memmap(tmp_path / "first", np.uint8, mode="r", shape=first.shape)
    packed = PackedMatrix(
        [GgufPart("q4_k", mapped[:16]), GgufPart("q4_k", mapped[16:]), GgufPart("q6_k", second)]
    )
    assert packed.formats == ("q4_k", "q6_k")
    expected = np.concatenate([dequantize(first, QUANTISED["q4_k"]), dequantize(second, QUANTISED["q6_k"])])
    x = np.random.default_rng(8).normal(size=(20, COLUMNS)).astype(np.float32)
    plain = product(PackedMatrix([expected]), x, "float32")
    np.testing.assert_array_equal(product(packed, x, "float32").view(np.uint32), plain.view(np.uint32))


Q4_0, Q8_0 = np.zeros((17, 36), np.uint8), np.zeros((16, 68), np.uint8)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "parts: none"),
        ([GgufPart("q4_0", Q4_0), GgufPart("q8_0", Q8_0)], "parts: 17 rows in front of one of q8_0"),
        (
            [GgufPart("q8_0", Q8_0), np.zeros((2, 65), np.float32)],
            r"parts\[1\]: 65 columns, those before have 64",
        ),
        ([np.zeros((2, 64), np.float64)], r"parts\[0\]: must be float32"),
        (["q8_0"], r"parts\[0\]: neither an array nor a GgufPart"),
    ],
)
def test_stacks_are_refused(parts: Sequence[GgufPart], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        PackedMatrix(parts)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("q3_k", Q4_0, 'kind: "q3_k", must be one of f32, f16'),
        ("q4_0", Q4_0[:, :17], "data: must be C-contiguous"),
        ("q8_0", Q4_0, "data: 36 bytes a row, a block of q8_0 has 34"),
        ("q4_0", Q4_0[0], "data: must have two dimensions"),
        ("q4_0", Q4_0.astype(np.float32), "data: must be uint8"),
    ],
)
def test_parts_are_refused(kind: str, data: NDArray[np.uint8], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        GgufPart(kind, data)


def test_activations_are_refused() -> None:
    with pytest.raises(ValueError, match=r'^activations: "int4", must be "float32", "int8" or "bfloat16"'):
        pagecast_native.Program(
            pagecast_native.Team(1),
            max_tokens=1,
            max_rows=1,
            activations="int4",  # type: ignore[arg-type]
        )
