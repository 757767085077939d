"""A Llama in plain torch that computes every token of a log anew: no KV, no blocks, no chunks.

Shares the file reader and the rotation angles with the worker and nothing else, and is what greedy ids are
compared with. Knows no session.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.rope import rope_tables
from worker.model.weights.gguf import read_gguf


class DenseModel:
    """Greedy continuations of the model in a file.

    Args:
        path: A GGUF file.
        vocab_size: Ids from here on are never drawn.
    """

    def __init__(self, path: Path, *, vocab_size: int) -> None:
        file = read_gguf(path)
        self._config = file.config
        self._weights = file.tensors
        self._vocab_size = vocab_size
        self._cos, self._sin = rope_tables(
            head_size=file.config.head_size,
            theta=file.config.rope_theta,
            max_context_tokens=file.config.max_context_tokens,
        )

    def generate(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """Greedy ids after a prompt, and the distance of the two largest logits at each."""
        ids, margins = list(prompt), []
        for _ in range(count):
            top = torch.topk(self._logits(ids)[: self._vocab_size], 2)
            ids.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
        return ids[len(prompt) :], margins

    def _logits(self, ids: Sequence[int]) -> Tensor:
        """[vocab] of the token after `ids`."""
        config, w = self._config, self._weights
        x = w["token_embd.weight"][list(ids)]
        for layer in range(config.num_layers):
            name = f"blk.{layer}"
            h = self._norm(x, w[f"{name}.attn_norm.weight"])
            q = self._rotate(self._heads(h, w[f"{name}.attn_q.weight"]))
            k = self._rotate(self._heads(h, w[f"{name}.attn_k.weight"]))
            v = self._heads(h, w[f"{name}.attn_v.weight"])
            shared = config.num_heads // config.num_kv_heads
            k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
            h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + h.transpose(0, 1).flatten(1) @ w[f"{name}.attn_output.weight"].T
            h = self._norm(x, w[f"{name}.ffn_norm.weight"])
            gate = functional.silu(h @ w[f"{name}.ffn_gate.weight"].T)
            x = x + (gate * (h @ w[f"{name}.ffn_up.weight"].T)) @ w[f"{name}.ffn_down.weight"].T
        return self._norm(x[-1], w["output_norm.weight"]) @ w["output.weight"].T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (self._config.hidden_size,), weight, self._config.rms_norm_eps)

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """[heads, tokens, head_size]."""
        return (x @ weight.T).unflatten(1, (-1, self._config.head_size)).transpose(0, 1)

    def _rotate(self, x: Tensor) -> Tensor:
        """Turn neighbouring lanes by each position's angles."""
        cos, sin = self._cos[: x.shape[1]], self._sin[: x.shape[1]]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(2)
