"""Key-value metadata of a GGUF file, typed and checked. Knows no tensors and no file.

Keys and their meaning: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from worker.model.config import LlamaConfig, ModelFileError
from worker.model.tokenizer import TokenizerFields

_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Metadata:
    """Typed look-ups; each raises ModelFileError naming the key that is absent or of another type."""

    values: Mapping[str, object]

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer at `key`; absent: `default`, or an error where that is None."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(f"{key} is {type(value).__name__}, it must be one integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        """The integer at `key`, or None."""
        return self.integer(key) if key in self.values else None

    def number(self, key: str, default: float | None = None) -> float:
        """The number at `key`; absent: `default`, or an error where that is None."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelFileError(f"{key} is {type(value).__name__}, it must be a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """The string at `key`; absent: `default`, or an error where that is None."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelFileError(f"{key} is {type(value).__name__}, it must be a string")
        return value

    def optional_text(self, key: str) -> str | None:
        """The string at `key`, or None."""
        return self.text(key) if key in self.values else None

    def flag(self, key: str, *, default: bool) -> bool:
        """The boolean at `key`; absent: `default`."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ModelFileError(f"{key} is {type(value).__name__}, it must be a boolean")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """The array of strings at `key`."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelFileError(f"{key} must be an array of strings")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """The array of integers at `key`."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ModelFileError(f"{key} must be an array of integers")
        return tuple(value)

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key, _ABSENT)
        if value is not _ABSENT:
            return value
        if default is None:
            raise ModelFileError(f"{key} is missing")
        return default


def llama_config(metadata: Metadata, vocab_size: int) -> LlamaConfig:
    """The model's sizes.

    Args:
        metadata: Of a file whose architecture is `llama`.
        vocab_size: Rows of its embedding.

    Raises:
        ModelFileError: A key is missing, wrong, or asks for what is not supported; names it.
    """
    hidden_size = metadata.integer("llama.embedding_length")
    num_heads = metadata.integer("llama.attention.head_count")
    if num_heads <= 0:
        raise ModelFileError(f"llama.attention.head_count is {num_heads}, it must be positive")
    head_size = metadata.integer("llama.attention.key_length", hidden_size // num_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.integer(key, head_size) != head_size:
            raise ModelFileError(
                f"{key} is {metadata.integer(key)}, only the head size {head_size} is supported"
            )
    if metadata.integer("llama.expert_count", 0) != 0:
        raise ModelFileError("llama.expert_count: mixtures of experts are not supported")
    if metadata.text("llama.rope.scaling.type", "none") != "none":
        raise ModelFileError(
            f"llama.rope.scaling.type {metadata.text('llama.rope.scaling.type')!r} is not supported"
        )
    return LlamaConfig(
        num_layers=metadata.integer("llama.block_count"),
        hidden_size=hidden_size,
        intermediate_size=metadata.integer("llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=metadata.integer("llama.attention.head_count_kv", num_heads),
        head_size=head_size,
        vocab_size=vocab_size,
        max_context_tokens=metadata.integer("llama.context_length"),
        rope_theta=metadata.number("llama.rope.freq_base", 10000.0),
        rms_norm_eps=metadata.number("llama.attention.layer_norm_rms_epsilon"),
    )


def tokenizer_fields(metadata: Metadata) -> TokenizerFields:
    """The tokenizer's parts.

    Raises:
        ModelFileError: A key is missing, of another type, or out of the vocabulary; names it.
    """
    return TokenizerFields(
        model=metadata.text("tokenizer.ggml.model"),
        pre=metadata.text("tokenizer.ggml.pre", "default"),
        tokens=metadata.strings("tokenizer.ggml.tokens"),
        token_types=metadata.integers("tokenizer.ggml.token_type"),
        merges=metadata.strings("tokenizer.ggml.merges"),
        bos_id=metadata.optional_integer("tokenizer.ggml.bos_token_id"),
        eos_id=metadata.optional_integer("tokenizer.ggml.eos_token_id"),
        eot_id=metadata.optional_integer("tokenizer.ggml.eot_token_id"),
        eom_id=metadata.optional_integer("tokenizer.ggml.eom_token_id"),
        unk_id=metadata.optional_integer("tokenizer.ggml.unknown_token_id"),
        add_bos=metadata.flag("tokenizer.ggml.add_bos_token", default=False),
        chat_template=metadata.optional_text("tokenizer.chat_template"),
    )
