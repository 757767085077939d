"""What benches stand on: a model, pools and runners over it, sized as a worker's are."""

import random
from dataclasses import dataclass
from typing import Any

import torch

from worker.kernel_choice import Kernels, Wanted, choose_kernels
from worker.kv.storage import CPU, KvStorage
from worker.model.llama import LlamaModel
from worker.model.weights.convert import Multiplier
from worker.model.weights.gguf import open_gguf, resolve_model_spec
from worker.model.weights.store import Activations
from worker.numerics import (
    WantedActivations,
    WantedKv,
    WantedWeights,
    choose_activations,
    choose_kv_dtype,
    choose_weights,
    name_of,
    step_tokens,
)
from worker.plan.program import Capacity
from worker.runner import Runner

BLOCK_SIZE = 16
MAX_STEP_ROWS = 32


def counted(number: int, what: str) -> str:
    """`1 session`, `2 sessions`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured, and on what.

    Attributes:
        name: Model spec, as given.
        llama: The model.
        kernels: What computes.
        num_threads: For kernels.
        weights: What matrices are kept as, e.g. `bfloat16+q4_1`.
        activations: What products are made of.
        kv_dtype: Of the pool.
    """

    name: str
    llama: LlamaModel
    kernels: Kernels
    num_threads: int
    weights: str
    activations: Activations
    kv_dtype: torch.dtype

    @classmethod
    def load(
        cls,
        model: str,
        *,
        kernels: Wanted,
        num_threads: int,
        weights: WantedWeights = "auto",
        activations: WantedActivations = "auto",
        kv_dtype: WantedKv = "auto",
    ) -> "Bench":
        """Read a model.

        Args:
            model: Model spec.
            kernels: As a worker's flag, like all that follow.
            num_threads: For kernels.
            weights: What matrices are kept as.
            activations: What products are made of.
            kv_dtype: Of the pool.

        Raises:
            worker.model.config.ModelFileError: There is no such model.
            KernelsMissing, KernelsUnsuitable: These kernels can't compute it here.
            worker.kernel_choice.SettingRefused: Nor with these numbers.
        """
        torch.set_num_threads(num_threads)
        source = open_gguf(resolve_model_spec(model))
        chosen = choose_kernels(kernels, source.config, BLOCK_SIZE)
        multiplier: Multiplier = "panels" if chosen.name == "native" else "tensors"
        file = source.read(choose_weights(weights, chosen, CPU), CPU, multiplier)
        products = choose_activations(activations, chosen, file.matrix_kinds)
        return cls(
            name=model,
            llama=LlamaModel.from_gguf(file),
            kernels=chosen,
            num_threads=num_threads,
            weights="+".join(file.matrix_kinds),
            activations=products,
            kv_dtype=choose_kv_dtype(kv_dtype, chosen, CPU, file.matrix_kinds, products),
        )

    @property
    def title(self) -> str:
        """The setting in one line."""
        kernels = f"{self.kernels.name} {self.kernels.kernel_set}".strip()
        numbers = f"{self.weights} weights, {self.activations} activations, {name_of(self.kv_dtype)} KV"
        return f"{self.name}, {numbers}, {kernels} kernels, {counted(self.num_threads, 'thread')}"

    @property
    def numbers(self) -> dict[str, Any]:
        """What `auto` became, for a report's setting."""
        return {
            "kernel_set": self.kernels.kernel_set,
            "weights": self.weights,
            "activations": self.activations,
            "kv_dtype": name_of(self.kv_dtype),
        }

    @property
    def capacity(self) -> Capacity:
        """Of the plans of `runner`."""
        return Capacity(
            self.max_step_tokens, MAX_STEP_ROWS, -(-self.llama.config.max_context_tokens // BLOCK_SIZE)
        )

    @property
    def max_step_tokens(self) -> int:
        """A worker's default."""
        return step_tokens(CPU, self.activations)

    def pool(self, num_blocks: int) -> KvStorage:
        """A zeroed pool."""
        config = self.llama.config
        return KvStorage(
            num_blocks=num_blocks,
            num_layers=config.num_layers,
            block_size=BLOCK_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            dtype=self.kv_dtype,
        )

    def runner(self, kv: KvStorage, *, max_step_tokens: int | None = None) -> Runner:
        """A fresh runner over `kv` with a worker's default limits, or more tokens."""
        return Runner(
            self.llama,
            kv,
            kernels=self.kernels.name,
            max_step_tokens=max_step_tokens or self.max_step_tokens,
            max_step_rows=MAX_STEP_ROWS,
            num_threads=self.num_threads,
            activations=self.activations,
        )


def scattered_tables(
    num_tables: int, num_tokens: int, num_blocks: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """Block tables for so many tokens each, of blocks drawn at random from the pool, none twice.

    Raises:
        ValueError: The pool has fewer blocks.
    """
    each = -(-num_tokens // BLOCK_SIZE)
    drawn = random.Random(seed).sample(range(num_blocks), num_tables * each)  # noqa: S311 - no secret
    return [tuple(drawn[start : start + each]) for start in range(0, len(drawn), each)]
