"""A held plan: program, fixed input buffers and the pool, bound once. Knows no sessions."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from worker.kernels.ops import implementations
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.plan.graph import StepInputs, trace
from worker.plan.program import lower


class StalePlan(Exception):
    """A plan was asked to run for something else than it was built for; nothing ran.

    Attributes:
        reasons: Names of the key's fields that differ.
    """

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__(f"plan was built for another {', '.join(reasons)}")
        self.reasons = reasons


class StepTooLarge(ValueError):
    """A step wants more than the plan has room for; nothing was bound."""

    def __init__(self, what: str, *, wanted: int, limit: int) -> None:
        super().__init__(f"{what}: wanted {wanted}, limit {limit}")
        self.what = what
        self.wanted = wanted
        self.limit = limit


@dataclass(frozen=True, slots=True)
class PlanKey:
    """What a plan was built for. Live rows, tokens and blocks are data and not part of it.

    Attributes:
        kernels: Name of the implementations.
        max_step_tokens: Tokens that a step may hold.
        max_step_rows: Rows that a step may hold.
        max_blocks: Width of the block table.
        block_size: Tokens per KV block.
        num_blocks: Blocks of the pool.
        num_layers: Layers of the model and the pool.
        dtype: Of the KV.
        model_instance_id: The model.
        kv_allocation_id: The pool.
    """

    kernels: str
    max_step_tokens: int
    max_step_rows: int
    max_blocks: int
    block_size: int
    num_blocks: int
    num_layers: int
    dtype: torch.dtype
    model_instance_id: int
    kv_allocation_id: int

    @classmethod
    def of(
        cls, model: LlamaModel, kv: KvStorage, *, kernels: str, max_step_tokens: int, max_step_rows: int
    ) -> "PlanKey":
        """The key of steps of `model` over `kv`; the block table is as wide as the model's context needs."""
        return cls(
            kernels=kernels,
            max_step_tokens=max_step_tokens,
            max_step_rows=max_step_rows,
            max_blocks=-(-model.config.max_context_tokens // kv.block_size),
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            num_layers=kv.num_layers,
            dtype=kv.data.dtype,
            model_instance_id=model.instance_id,
            kv_allocation_id=kv.allocation_id,
        )

    def differences(self, other: "PlanKey") -> tuple[str, ...]:
        """Names of the fields in which `other` differs."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))


class PagedDecodeSession:
    """The step traced, lowered and bound to its buffers; each step only writes inputs and replays.

    Args:
        model: Traced, its weights bound.
        kv: Bound; it mutates in place.
        key: What this plan is for, of the same model and pool.

    Attributes:
        key: As given.
        realize_count: Replays so far.

    Raises:
        StalePlan: `key` is of another model or pool.
        ValueError: The pool's layers are not those of the model.
    """

    def __init__(self, model: LlamaModel, kv: KvStorage, key: PlanKey) -> None:
        actual = PlanKey.of(
            model,
            kv,
            kernels=key.kernels,
            max_step_tokens=key.max_step_tokens,
            max_step_rows=key.max_step_rows,
        )
        if reasons := key.differences(actual):
            raise StalePlan(reasons)
        self.key = key
        self.realize_count = 0
        self._program = lower(trace(model, kv), implementations(key.kernels))
        tokens, rows, device = key.max_step_tokens, key.max_step_rows, kv.data.device

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._buffers = StepInputs(
            token_ids=buffer(tokens),
            position=buffer(tokens),
            slot_mapping=buffer(tokens, dtype=torch.int64),
            block_table=buffer(rows, key.max_blocks),
            context_len=buffer(rows),
            query_start=buffer(rows + 1),
            logits_index=buffer(tokens),
        )
        self._bound: StepInputs | None = None

    @property
    def launches(self) -> int:
        """Kernel launches of one replay."""
        return len(self._program.launches)

    def is_valid_for(self, key: PlanKey) -> bool:
        """Whether this plan may run steps of `key`."""
        return self.key == key

    def bind(self, inputs: StepInputs, key: PlanKey) -> None:
        """Writes one step's inputs into the plan's buffers.

        Args:
            inputs: Any number of tokens, rows and logits within the key's limits; a narrower block
                table is filled up with 0.
            key: What the step belongs to.

        Raises:
            StalePlan: The plan was built for another key.
            StepTooLarge: An input is larger than its buffer.
        """
        self._bound = None
        if not self.is_valid_for(key):
            raise StalePlan(self.key.differences(key))
        for name, buffer, value in zip(StepInputs._fields, self._buffers, inputs, strict=True):
            for wanted, limit in zip(value.shape, buffer.shape, strict=True):
                if wanted > limit:
                    raise StepTooLarge(name, wanted=wanted, limit=limit)
        self._bound = StepInputs(
            *(self._write(buffer, value) for buffer, value in zip(self._buffers, inputs, strict=True))
        )

    @staticmethod
    def _write(buffer: Tensor, value: Tensor) -> Tensor:
        live = buffer[: value.shape[0]]
        if value.dim() > 1:
            live.zero_()
            live[:, : value.shape[1]] = value
        else:
            live.copy_(value)
        return live

    def run(self) -> Tensor:
        """Replays the plan over what was bound last, once.

        Returns:
            Logits [L, vocab] float32.

        Raises:
            RuntimeError: Nothing was bound since the last run.
        """
        if self._bound is None:
            raise RuntimeError("run without bind: a plan replays each binding once")
        inputs, self._bound = self._bound, None
        self.realize_count += 1
        return self._program.run(inputs)
