"""Turns a batch into tensors, runs it on its plans and hands back logits. Draws no tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.batch import Batch, DecodePlan, Row, RowResult
from worker.kernels.ops import implementations
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.plan.decode_session import StepTooLarge
from worker.plan.graph import StepInputs
from worker.plan.policy import PlanPolicy


class RowsNotInvariant(RuntimeError):
    """The linear kernel gave a row other bits beside other rows; this machine's workers could not agree."""


class StepLogits(NamedTuple):
    """What a step computed.

    Attributes:
        logits: [n, vocab] float32 in host memory, for the n rows with `wants_logits` in batch order.
        results: One per row of the batch.
    """

    logits: Tensor
    results: tuple[RowResult, ...]


def step_inputs(rows: tuple[Row, ...], block_size: int) -> StepInputs:
    """Lays rows out as the tensors of one step.

    Args:
        rows: At least one.
        block_size: Tokens per KV block.

    Returns:
        Inputs with a block table as wide as the longest row's, unused tails 0.
    """
    token_ids: list[int] = []
    position: list[int] = []
    slot_mapping: list[int] = []
    query_start = [0]
    logits_index: list[int] = []
    for row in rows:
        token_ids += row.token_ids
        positions = range(row.position, row.context_len)
        position += positions
        slot_mapping += [row.block_table[p // block_size] * block_size + p % block_size for p in positions]
        query_start.append(len(token_ids))
        if row.wants_logits:
            logits_index.append(len(token_ids) - 1)
    width = max(len(row.block_table) for row in rows)
    return StepInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        position=torch.tensor(position, dtype=torch.int32),
        slot_mapping=torch.tensor(slot_mapping, dtype=torch.int64),
        block_table=torch.tensor(
            [row.block_table + (0,) * (width - len(row.block_table)) for row in rows], dtype=torch.int32
        ),
        context_len=torch.tensor([row.context_len for row in rows], dtype=torch.int32),
        query_start=torch.tensor(query_start, dtype=torch.int32),
        logits_index=torch.tensor(logits_index, dtype=torch.int32),
    )


class Runner:
    """Runs batches of one model over one pool.

    Rows of REPLAN run in a turn of their own after the batch's other rows are computed.

    Args:
        model: The model.
        kv: Storage with the model's layers and heads.
        kernels: One of `worker.kernels.ops.KERNELS`.
        max_step_tokens: Most tokens of a batch.
        max_step_rows: Most rows of a batch.

    Raises:
        ValueError: A limit is below 1, or `kv` is not of the model's sizes.
    """

    def __init__(
        self, model: LlamaModel, kv: KvStorage, *, kernels: str, max_step_tokens: int, max_step_rows: int
    ) -> None:
        for name, limit in (("max_step_tokens", max_step_tokens), ("max_step_rows", max_step_rows)):
            if limit < 1:
                raise ValueError(f"{name}={limit} is below 1")
        for name in ("num_layers", "num_kv_heads", "head_size"):
            if getattr(kv, name) != getattr(model.config, name):
                raise ValueError(
                    f"kv.{name}={getattr(kv, name)}, the model's is {getattr(model.config, name)}"
                )
        self._model = model
        self._kv = kv
        self._kernels = kernels
        self._max_step_tokens = max_step_tokens
        self._max_step_rows = max_step_rows
        self._policy = PlanPolicy(
            kernels=kernels, max_step_tokens=max_step_tokens, max_step_rows=max_step_rows
        )

    @property
    def builds(self) -> int:
        """Plans that were built to be held, by steps or by `warm_up`."""
        return self._policy.builds

    @property
    def reuses(self) -> int:
        """Program runs that replayed the held plan."""
        return self._policy.reuses

    @property
    def replans(self) -> int:
        """Program runs on a plan of their own."""
        return self._policy.replans

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Checks the linear kernel, builds the held plan and runs it once, so that no user pays for it.

        The dummy step writes to block 0 and restores it.

        Raises:
            RowsNotInvariant: The linear kernel's rows depend on each other here.
        """
        self._check_row_invariance()
        plan, _ = self._policy.held_plan(self._model, self._kv)
        row = Row("", (0,), 0, (0,), wants_logits=True, plan=DecodePlan.PLAN_ONCE)
        saved = self._kv.data[0].clone()
        plan.bind(step_inputs((row,), self._kv.block_size), self._policy.key(self._model, self._kv))
        plan.run()
        self._kv.data[0] = saved

    def _check_row_invariance(self) -> None:
        linear = implementations(self._kernels)["pagecast.linear"]
        of_shape = {
            tuple(weight.shape): weight for weight in self._model.weights.values() if weight.dim() == 2
        }
        generator = torch.Generator().manual_seed(0)
        for shape, weight in of_shape.items():
            x = torch.randn(37, shape[1], generator=generator).to(weight.device)
            alone = torch.cat([linear(x[row : row + 1], weight) for row in (0, 15, 16, 36)])
            if not torch.equal(linear(x, weight)[[0, 15, 16, 36]], alone):
                raise RowsNotInvariant(f"linear {shape}: a row alone has other bits than among 37 rows")

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepLogits:
        """Computes a batch: stores the KV of its tokens and returns the logits that rows want.

        Args:
            batch: Rows of one step.

        Raises:
            StepTooLarge: The batch, or a row's context, is over a limit; nothing ran.
            ValueError: A row's values are wrong; nothing ran.
        """
        self._check(batch)
        results: list[RowResult | None] = [None] * len(batch.rows)
        wanting = [index for index, row in enumerate(batch.rows) if row.wants_logits]
        logits = torch.empty(len(wanting), self._model.config.vocab_size)
        for plan in (DecodePlan.PLAN_ONCE, DecodePlan.REPLAN):
            turn = [index for index, row in enumerate(batch.rows) if row.plan is plan]
            if not turn:
                continue
            inputs = step_inputs(tuple(batch.rows[index] for index in turn), self._kv.block_size)
            step = self._policy.forward_paged_step_persistent(inputs, plan, self._model, self._kv)
            logits[[place for place, index in enumerate(wanting) if batch.rows[index].plan is plan]] = (
                step.logits
            )
            result = RowResult(
                plan_action=step.action,
                plan_ns=step.plan_ns,
                step_ns=step.step_ns,
                launches=step.launches,
                host_bytes=step.host_bytes,
                batch_size=len(turn),
            )
            for index in turn:
                results[index] = result
        return StepLogits(logits, tuple(result for result in results if result is not None))

    @torch.inference_mode()
    def zero(self, blocks: Sequence[int]) -> None:
        """Overwrites blocks whose numbers can't be trusted. Raises ValueError for one that is not there."""
        self._kv.zero(blocks)

    def _check(self, batch: Batch) -> None:
        config, kv = self._model.config, self._kv
        for what, wanted, limit in (
            ("rows", len(batch.rows), self._max_step_rows),
            ("tokens", batch.num_tokens, self._max_step_tokens),
            (
                "context_len",
                max((row.context_len for row in batch.rows), default=0),
                config.max_context_tokens,
            ),
        ):
            if wanted > limit:
                raise StepTooLarge(what, wanted=wanted, limit=limit)
        written: set[tuple[int, int]] = set()
        for index, row in enumerate(batch.rows):
            where = f"rows[{index}]"
            if not row.token_ids:
                raise ValueError(f"{where}.token_ids is empty")
            if not all(0 <= token < config.vocab_size for token in row.token_ids):
                raise ValueError(f"{where}.token_ids holds an id outside 0..{config.vocab_size - 1}")
            if row.position < 0:
                raise ValueError(f"{where}.position={row.position} is below 0")
            wanted = -(-row.context_len // kv.block_size)
            if not wanted <= len(row.block_table) <= -(-config.max_context_tokens // kv.block_size):
                raise ValueError(
                    f"{where}.block_table has {len(row.block_table)} blocks, {wanted} are needed"
                )
            if not all(0 <= block < kv.num_blocks for block in row.block_table):
                raise ValueError(f"{where}.block_table holds a block outside 0..{kv.num_blocks - 1}")
            slots = {
                (row.block_table[position // kv.block_size], position % kv.block_size)
                for position in range(row.position, row.context_len)
            }
            if len(slots) < len(row.token_ids) or slots & written:
                raise ValueError(f"{where}.block_table: a slot would be written twice in one step")
            written |= slots
