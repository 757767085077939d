"""Opens GGUF files and checks that they hold a Llama model, whole. Reads no weights.

Format: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct, error
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, ReaderField, ReaderTensor

from worker.model.config import LlamaConfig, ModelFileError
from worker.model.weights.metadata import Metadata, llama_config

ARCHITECTURE = "llama"
"""`general.architecture` of the files that are taken."""

# What the reader raises on bytes that are no GGUF: it trusts its input.
_READER_ERRORS = (
    ValueError, IndexError, KeyError, TypeError, OverflowError, ArithmeticError, MemoryError, error,
)  # fmt: skip
_LENGTH = Struct("=Q")


def open_checked(path: Path) -> tuple[dict[str, ReaderTensor], Metadata, LlamaConfig]:
    """The file's tensors by name, not read yet, its metadata, and the sizes that both agree on.

    Raises:
        ModelFileError: The bytes are no GGUF, or no Llama model that is supported.
        OSError: The file can't be read.
    """
    reader, metadata = _open(path)
    architecture = metadata.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise ModelFileError(f"general.architecture is {architecture!r}, only {ARCHITECTURE!r} is supported")
    sources = {tensor.name: tensor for tensor in reader.tensors}
    embedding = sources.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError("tensor token_embd.weight is missing")
    config = llama_config(metadata, vocab_size=int(embedding.shape[-1]))
    _check_tensors(sources, config)
    return sources, metadata, config


@dataclass(frozen=True, slots=True)
class _Texts:
    """An array of strings, in the place of a part of a field."""

    values: list[str]


class _BoundedReader(GGUFReader):
    """Refuses what lies beyond the file, and reads an array at once.

    The plain reader takes short slices beyond the end, and loops over nothing for ever on a damaged array
    length. It makes several objects of each element of an array, for a vocabulary some 400,000, which take
    seconds, and 150 MB that other objects then keep from being given back.
    """

    def _get(
        self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None
    ) -> npt.NDArray[Any]:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"needs {end} bytes, the file has {len(self.data)}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        start, is_array = int(orig_offs), raw_type == GGUFValueType.ARRAY
        if not is_array or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(start, np.uint32)[0]))
        count = int(self._get(start + 4, np.uint64)[0])
        first = start + 4 + 8
        types = [GGUFValueType.ARRAY, *([kind] if count else [])]
        if kind == GGUFValueType.STRING:
            end, texts = self._texts(first, count)
            return end - start, [_Texts(texts)], [0], types
        if kind not in self.gguf_scalar_to_np:
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(first, self.gguf_scalar_to_np[kind], count)
        return first + int(values.nbytes) - start, [values], [0], types

    def _texts(self, start: int, count: int) -> tuple[int, list[str]]:
        """Where an array of strings ends, and the strings."""
        data = self.data.data
        texts = []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, start)
            start += _LENGTH.size
            if start + length > len(data):
                raise ValueError(f"needs {start + length} bytes, the file has {len(data)}")
            texts.append(str(data[start : start + length], "utf-8"))
            start += length
        return start, texts


def _open(path: Path) -> tuple[GGUFReader, Metadata]:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelFileError("not a GGUF file")
    try:
        # A wrapped 64-bit offset must not pass for a small one.
        with np.errstate(over="raise"):
            reader = _BoundedReader(path)
        metadata = Metadata({key: _contents(field) for key, field in reader.fields.items()})
    except _READER_ERRORS as error:
        raise ModelFileError(f"damaged or truncated GGUF ({error})") from error
    if reader.byte_order == "S":
        raise ModelFileError("the file is of the other byte order")
    return reader, metadata


def _contents(field: ReaderField) -> object:
    last: object = field.parts[-1]
    return last.values if isinstance(last, _Texts) else field.contents()


def _check_tensors(sources: dict[str, ReaderTensor], config: LlamaConfig) -> None:
    optional = {"output.weight", "rope_freqs.weight"}
    expected: set[str] = set()
    # Missing ones are met in order, so a damaged layer count ends here and not in a huge table.
    for name, shape in _expected_shapes(config):
        if name not in sources:
            if name in optional:
                continue
            raise ModelFileError(f"tensor {name} is missing")
        found = shape_of(sources[name])
        if found != shape:
            raise ModelFileError(f"tensor {name} has shape {list(found)}, expected {list(shape)}")
        expected.add(name)
    for name in sources:
        if name not in expected:
            raise ModelFileError(f"tensor {name} is not part of a Llama model that is supported")


def _expected_shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    query, key_value = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    yield "token_embd.weight", (vocab, hidden)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (vocab, hidden)
    yield "rope_freqs.weight", (config.head_size // 2,)
    for layer in range(config.num_layers):
        prefix = f"blk.{layer}"
        yield f"{prefix}.attn_norm.weight", (hidden,)
        yield f"{prefix}.attn_q.weight", (query, hidden)
        yield f"{prefix}.attn_k.weight", (key_value, hidden)
        yield f"{prefix}.attn_v.weight", (key_value, hidden)
        yield f"{prefix}.attn_output.weight", (hidden, query)
        yield f"{prefix}.ffn_norm.weight", (hidden,)
        yield f"{prefix}.ffn_gate.weight", (inner, hidden)
        yield f"{prefix}.ffn_up.weight", (inner, hidden)
        yield f"{prefix}.ffn_down.weight", (hidden, inner)


def shape_of(source: ReaderTensor) -> tuple[int, ...]:
    """[out, in] where the file counts from the innermost dimension."""
    return tuple(int(size) for size in reversed(source.shape))
