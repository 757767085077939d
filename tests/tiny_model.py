"""Writes a complete Llama GGUF with random weights, small enough for any test."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

from tests.gguf_blocks import blocks_of

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# What is merged beside single bytes; "Ġ" is the space.
MERGES = ("t h", "th e", "Ġ the", "i n", "Ġ a", "e r", "o n", "h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ċ Ċ")


def byte_characters() -> list[str]:
    """The printable character of each byte 0..255 in GPT-2's byte-level alphabet."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(shifted)) for byte in range(256)]


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    intermediate_size: int = 128,
    max_context_tokens: int = 1024,
    chat_template: str | None = CHATML,
    padded_vocab: int = 0,
    add_bos: bool = False,
    ends: bool = True,
    nan_token: int | None = None,
    is_tied: bool = False,
    formats: Mapping[str, str] | str = "F32",
    largest: Mapping[str, float] | None = None,
) -> Path:
    """Writes the file and returns `path`.

    Ids: 0 `<|endoftext|>` (BOS), 1 `<|im_start|>`, 2 `<|im_end|>` (EOS), then the 256 bytes, then the merges.

    Args:
        path: Where to write.
        seed: Of the weights: the same seed and sizes, the same file.
        num_layers: As in `LlamaConfig`, like the sizes that follow.
        hidden_size: See there.
        num_heads: See there.
        num_kv_heads: See there.
        head_size: See there.
        intermediate_size: See there.
        max_context_tokens: See there.
        chat_template: Jinja source; None leaves it out.
        padded_vocab: Embedding rows beyond the tokenizer. Their logits are the largest, so that a sampler
            which does not mask them draws them.
        add_bos: `tokenizer.ggml.add_bos_token`.
        ends: Whether greedy turns may draw the EOS; if not its logit is 0, far below the largest.
        nan_token: An id whose embedding is NaN: logits after an input that holds it are NaN. The output's
            rows are their own, so others' logits stay as they are.
        is_tied: Leaves the output's matrix out: the embedding is also the head.
        formats: Of matrices, e.g. `Q8_0`: of all of them, or by name; others are F32. Of Q4_K, Q5_K and Q6_K
            all but the size of a row's weights is random.
        largest: By a matrix's name what its first weight is instead.
    """
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(num_layers)
    writer.add_context_length(max_context_tokens)
    writer.add_embedding_length(hidden_size)
    writer.add_feed_forward_length(intermediate_size)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)

    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = byte_characters() + [merge.replace(" ", "") for merge in MERGES]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(control + words)
    writer.add_token_types([TokenType.CONTROL] * len(control) + [TokenType.NORMAL] * len(words))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)

    random = np.random.default_rng(seed)

    def add_matrix(name: str, weights: np.ndarray[Any, Any]) -> None:
        weights = weights.astype(np.float32)
        weights.flat[0] = (largest or {}).get(name, weights.flat[0])
        kind = GGMLQuantizationType[formats if isinstance(formats, str) else formats.get(name, "F32")]
        writer.add_tensor(name, blocks_of(weights, kind, random), raw_dtype=kind)

    def add(name: str, *shape: int, gain: float = 1.0) -> None:
        add_matrix(name, random.standard_normal(shape) * gain / np.sqrt(shape[-1]))

    def add_norm(name: str) -> None:
        writer.add_tensor(name, random.uniform(0.5, 1.5, hidden_size).astype(np.float32))

    num_tokens = len(control) + len(words)
    query, key_value = num_heads * head_size, num_kv_heads * head_size
    embedding = random.standard_normal((num_tokens + padded_vocab, hidden_size))
    if nan_token is not None:
        embedding[nan_token] = np.nan
    add_matrix("token_embd.weight", embedding)
    # Layers outweigh the embedding, so that what a token attends decides what follows it.
    for layer in range(num_layers):
        add_norm(f"blk.{layer}.attn_norm.weight")
        add(f"blk.{layer}.attn_q.weight", query, hidden_size, gain=1.5)
        add(f"blk.{layer}.attn_k.weight", key_value, hidden_size, gain=1.5)
        add(f"blk.{layer}.attn_v.weight", key_value, hidden_size, gain=2.0)
        add(f"blk.{layer}.attn_output.weight", hidden_size, query, gain=2.0)
        add_norm(f"blk.{layer}.ffn_norm.weight")
        add(f"blk.{layer}.ffn_gate.weight", intermediate_size, hidden_size, gain=1.5)
        add(f"blk.{layer}.ffn_up.weight", intermediate_size, hidden_size, gain=1.5)
        add(f"blk.{layer}.ffn_down.weight", hidden_size, intermediate_size, gain=2.0)
    add_norm("output_norm.weight")
    output = random.standard_normal((num_tokens + padded_vocab, hidden_size)) * (2.0 / np.sqrt(hidden_size))
    output[num_tokens:] *= 100.0
    if not ends:
        output[2] = 0.0
    if not is_tied:
        add_matrix("output.weight", output)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
