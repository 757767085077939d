"""Opens GGUF files and checks that they hold a Llama model, whole. Reads no weights.

Format: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor

from worker.model.config import LlamaConfig, ModelFileError
from worker.model.weights.metadata import Metadata, llama_config

ARCHITECTURE = "llama"
"""`general.architecture` of the files that are taken."""

# What the reader raises on bytes that are no GGUF: it trusts its input.
_READER_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, ArithmeticError, MemoryError)


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


class _BoundedReader(GGUFReader):
    """Refuses what lies beyond the file.

    The plain reader takes short slices there, and loops over nothing for ever on a damaged array length.
    """

    def _get(
        self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None
    ) -> npt.NDArray[Any]:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"needs {end} bytes, the file has {len(self.data)}")
        return super()._get(offset, dtype, count, override_order)


def _open(path: Path) -> tuple[GGUFReader, Metadata]:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelFileError("not a GGUF file")
    try:
        # A wrapped 64-bit offset must not pass for a small one.
        with np.errstate(over="raise"):
            reader = _BoundedReader(path)
        metadata = Metadata({key: field.contents() for key, field in reader.fields.items()})
    except _READER_ERRORS as error:
        raise ModelFileError(f"damaged or truncated GGUF ({error})") from error
    if reader.byte_order == "S":
        raise ModelFileError("the file is of the other byte order")
    return reader, metadata


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
