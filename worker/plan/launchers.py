"""What a device's plans launch, as they see it: one launcher an operator, and what decides the values' forms.

Launchers write to memory that they are given and allocate nothing. Imports no triton; see `triton_launchers`.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from worker.batch import TokenClass
from worker.kernels.ops import Implementation
from worker.kernels.quantised import QuantisedMatrix
from worker.kv.storage import KvStorage
from worker.model.config import LlamaConfig

Matrix: TypeAlias = Tensor | QuantisedMatrix


class Launchers(Protocol):
    """Kernels of one device. Their arguments are those of the references, `out`, and what classes need."""

    @property
    def name(self) -> str:
        """Tells apart kernels that could give other bits; part of a plan's key."""

    @property
    def operators(self) -> Mapping[str, Implementation]:
        """By name, all of `worker.kernels.ops.TRITON_OPERATORS`."""

    def bind_step(self, *arguments: Any, **named: Any) -> None:
        """See `worker.kernels.reference.bind_step`."""

    def logits_sample(self, *arguments: Any, **named: Any) -> Any:
        """See `worker.kernels.reference.logits_sample`."""

    def sample_workspace(self, *, num_rows: int, num_entries: int, vocab_size: int) -> Any:
        """Memory that `logits_sample` is given as `workspace`, for so many rows and entries of all rows."""

    def splits(self, weight: Matrix, token_class: TokenClass) -> int:
        """In how many planes a product with a weight leaves its sums."""

    def product_dtype(self, weight: Matrix) -> torch.dtype:
        """What a product with a weight rounds the other factor to."""

    def attention_dtype(self, kv_dtype: torch.dtype) -> torch.dtype:
        """What attention over such a pool rounds queries to."""

    def workspace_floats(
        self,
        config: LlamaConfig,
        kv: KvStorage,
        token_class: TokenClass,
        *,
        num_tokens: int,
        num_rows: int,
        max_context_tokens: int,
    ) -> int:
        """Floats that attention needs beside its result for so many tokens and rows."""

    def unsuitable(self, config: LlamaConfig, kv: KvStorage) -> str | None:
        """Why a model over a pool can't be run; None: it can."""
