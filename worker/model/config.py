"""What a Llama model is made of. Knows no file format and no torch."""

from dataclasses import dataclass, fields

# The table of rotation angles has a row for each position: 256 MiB at a head size of 64.
MAX_CONTEXT_TOKENS = 1 << 20


class ModelFileError(Exception):
    """A model file, or the spec that should lead to one, can't be used; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and constants of a Llama decoder.

    Attributes:
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the SwiGLU MLP.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; a divisor of `num_heads`.
        head_size: Width of one head; even, because rope turns pairs.
        vocab_size: Rows of the embedding; may be larger than the tokenizer.
        max_context_tokens: Longest log that the model was trained for, up to `MAX_CONTEXT_TOKENS`.
        rope_theta: Base of the rotary angles.
        rms_norm_eps: Added to the mean square before its root.

    Raises:
        ModelFileError: A value is out of range or does not fit another; names the field.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_context_tokens: int
    rope_theta: float
    rms_norm_eps: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ModelFileError(f"{field.name} is {value}, it must be positive and finite")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ModelFileError(f"head_size {self.head_size} is odd, rope turns pairs")
        if self.max_context_tokens > MAX_CONTEXT_TOKENS:
            raise ModelFileError(
                f"max_context_tokens {self.max_context_tokens} is over the {MAX_CONTEXT_TOKENS} "
                "that are supported"
            )
