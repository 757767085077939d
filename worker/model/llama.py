"""A Llama model: weights and the step, written once over the operators.

Knows neither plans nor batches: the step takes tensors, or traced values in their place.
"""

from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from worker.kernels import ops
from worker.model.config import LlamaConfig
from worker.model.rope import rope_tables
from worker.model.weights.file_matrix import FileMatrix
from worker.model.weights.quantised import QuantisedMatrix
from worker.model.weights.store import WeightStore

if TYPE_CHECKING:  # a model of tensors needs no reader of files
    from worker.model.weights.gguf import GgufFile

_instance_ids = count(1)
CPU = torch.device("cpu")
ROPE_TABLES = ("rope.cos", "rope.sin")
"""Names of the rotation tables among a model's tensors."""


class KvLayers(Protocol):
    """What the step needs of the KV pool: per layer [num_blocks, block_size, num_kv_heads, head_size]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class LlamaModel:
    """Weights of one model and the step over them.

    Args:
        config: Sizes.
        tensors: Contiguous, by GGUF name, in the shapes of `config`: vectors float32, matrices of any float
            dtype, quantised, or, for native kernels, in their file; without `output.weight` the embedding is
            also the head.
        device: Where the weights go.

    Attributes:
        config: Sizes.
        store: All tensors that the step reads beside its inputs and the KV: weights by GGUF name, [out, in],
            with `output.weight` always there, tied or not, and the tables `rope.cos` and `rope.sin`.
        instance_id: Names this instance; never used again in this process.
    """

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, Tensor | QuantisedMatrix | FileMatrix],
        *,
        device: torch.device = CPU,
    ) -> None:
        weights = {
            name: tensor if isinstance(tensor, FileMatrix) else tensor.to(device)
            for name, tensor in tensors.items()
        }
        factors = weights.pop("rope_freqs.weight", None)
        weights.setdefault("output.weight", weights["token_embd.weight"])
        cos, sin = rope_tables(
            head_size=config.head_size,
            theta=config.rope_theta,
            max_context_tokens=config.max_context_tokens,
            # Of a model of shapes only there is nothing to divide by.
            frequency_factors=factors.cpu() if isinstance(factors, Tensor) and not factors.is_meta else None,
        )
        self.config = config
        self.store = WeightStore({**weights, "rope.cos": cos.to(device), "rope.sin": sin.to(device)})
        self.instance_id = next(_instance_ids)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights by GGUF name, as `WeightStore.tensors` holds them now."""
        return {name: tensor for name, tensor in self.store.tensors.items() if name not in ROPE_TABLES}

    @classmethod
    def from_gguf(cls, file: "GgufFile", *, device: torch.device = CPU) -> Self:
        """Takes the weights of a file that was read and checked."""
        return cls(file.config, file.tensors, device=device)

    def forward_paged_step(
        self,
        token_ids: Tensor,
        position: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        context_len: Tensor,
        query_start: Tensor,
        logits_index: Tensor,
        kv: KvLayers,
    ) -> Tensor:
        """Computes T tokens of R rows: stores their KV and returns the logits that are wanted.

        Prefill, decode and mixed steps are one: a row has as many new tokens as `query_start` says, maybe
        none. Written for the reader: a plan's passes move the selection of rows up and merge and fuse.

        Args:
            token_ids: [T] int32.
            position: [T] int32, of each token in its row's log.
            slot_mapping: [T] int64, where each token's KV goes.
            block_table: [R, max_blocks] int32.
            context_len: [R] int32, tokens that a row's last token attends, itself included.
            query_start: [R + 1] int32, first token of each row, then T.
            logits_index: [L] int32, tokens that logits are wanted for.
            kv: A pool of this model's layers; written.

        Returns:
            [L, vocab] float32.
        """
        w, eps = self.store.tensors, self.config.rms_norm_eps
        cos, sin = (w[name] for name in ROPE_TABLES)
        scale = self.config.head_size**-0.5
        x = ops.embedding(w["token_embd.weight"], token_ids)
        for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
            name = f"blk.{layer}"
            h = ops.rms_norm(x, w[f"{name}.attn_norm.weight"], eps)
            q = ops.rope(ops.linear(h, w[f"{name}.attn_q.weight"]), position, cos, sin)
            k = ops.rope(ops.linear(h, w[f"{name}.attn_k.weight"]), position, cos, sin)
            v = ops.linear(h, w[f"{name}.attn_v.weight"])
            ops.store_kv(k, v, slot_mapping, keys, values)
            h = ops.paged_attention(q, keys, values, block_table, context_len, query_start, scale)
            x = ops.add(x, ops.linear(h, w[f"{name}.attn_output.weight"]))
            h = ops.rms_norm(x, w[f"{name}.ffn_norm.weight"], eps)
            gate = ops.linear(h, w[f"{name}.ffn_gate.weight"])
            up = ops.linear(h, w[f"{name}.ffn_up.weight"])
            x = ops.add(x, ops.linear(ops.swiglu(gate, up), w[f"{name}.ffn_down.weight"]))
        x = ops.rms_norm(x, w["output_norm.weight"], eps)
        return ops.select_rows(ops.linear(x, w["output.weight"]), logits_index)
