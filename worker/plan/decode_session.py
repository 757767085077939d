"""A held plan: program, input buffers with stable rows, and the pool, bound once. Knows no policy."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from worker.batch import Row, TokenClass
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.plan.buffers import Binding, StepBuffers
from worker.plan.executor import DrawnRun, Executor, Kernels
from worker.plan.graph import trace
from worker.plan.host_draws import OutputOnHost
from worker.plan.lower import lower
from worker.plan.passes import optimise
from worker.plan.program import Capacity, Program
from worker.plan.rows import StepLimits
from worker.sampling import Draw


class StalePlan(Exception):
    """A plan was asked to run for something else than it was built for; nothing ran.

    Attributes:
        reasons: Names of the key's fields that differ.
    """

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__(f"plan was built for another {', '.join(reasons)}")
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class PlanKey:
    """What a plan was built for. Live rows, tokens and blocks are data and not part of it.

    Attributes:
        kernels: Name of the kernels: implementation, kernel set and threads.
        max_step_tokens: Tokens that a step may hold.
        max_step_rows: Rows that a step may hold.
        max_context_tokens: Tokens that a row may attend.
        block_size: Tokens per KV block.
        num_blocks: Blocks of the pool.
        num_layers: Layers of the model and the pool.
        dtype: Of the KV.
        model_instance_id: The model.
        kv_allocation_id: The pool.
        token_class: Of the tokens, where kernels tell classes apart; elsewhere DECODE.
    """

    kernels: str
    max_step_tokens: int
    max_step_rows: int
    max_context_tokens: int
    block_size: int
    num_blocks: int
    num_layers: int
    dtype: torch.dtype
    model_instance_id: int
    kv_allocation_id: int
    token_class: TokenClass = TokenClass.DECODE

    @classmethod
    def of(
        cls,
        model: LlamaModel,
        kv: KvStorage,
        *,
        kernels: str,
        max_step_tokens: int,
        max_step_rows: int,
        token_class: TokenClass = TokenClass.DECODE,
    ) -> "PlanKey":
        """The key of steps of `model` over `kv`; a row is at most as long as the context or the pool."""
        return cls(
            kernels=kernels,
            max_step_tokens=max_step_tokens,
            max_step_rows=max_step_rows,
            max_context_tokens=min(model.config.max_context_tokens, kv.num_blocks * kv.block_size),
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            num_layers=kv.num_layers,
            dtype=kv.data.dtype,
            model_instance_id=model.instance_id,
            kv_allocation_id=kv.allocation_id,
            token_class=token_class,
        )

    def differences(self, other: "PlanKey") -> tuple[str, ...]:
        """Names of the fields in which `other` differs."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))

    def limits(self, vocab_size: int) -> StepLimits:
        """What rows of a step may be."""
        return StepLimits(
            num_tokens=self.max_step_tokens,
            num_rows=self.max_step_rows,
            max_context_tokens=self.max_context_tokens,
            vocab_size=vocab_size,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
        )


def step_program(model: LlamaModel, kv: KvStorage, capacity: Capacity) -> Program:
    """The step of `model` over `kv`, traced, optimised and lowered."""
    return lower(optimise(trace(model, kv)), capacity)


class PagedDecodeSession:
    """The step traced, optimised, lowered and bound to its memory; each step only writes inputs and replays.

    Args:
        model: Traced; its weights are bound.
        kv: Bound; it mutates in place.
        key: What this plan is for, of the same model and pool.
        kernels: What runs the program; `key.kernels` is their name.
        vocab_size: Ids from here on are padding, and never drawn; None: there are none.

    Attributes:
        key: As given.
        program: What a replay runs.
        read_bytes: What is read of one row's logits: the id that is drawn in place, or all of them where
            they are copied from a device.
        realize_count: Replays so far.

    Raises:
        StalePlan: `key` is of another model, pool or kernels.
        ValueError: The pool's layers are not those of the model, or the kernels do not suit its sizes.
    """

    def __init__(
        self,
        model: LlamaModel,
        kv: KvStorage,
        key: PlanKey,
        kernels: Kernels,
        *,
        vocab_size: int | None = None,
    ) -> None:
        actual = PlanKey.of(
            model,
            kv,
            kernels=kernels.name,
            max_step_tokens=key.max_step_tokens,
            max_step_rows=key.max_step_rows,
        )
        if reasons := key.differences(actual):
            raise StalePlan(reasons)
        self.key = key
        self.realize_count = 0
        limits = key.limits(model.config.vocab_size)
        self.program = step_program(model, kv, limits.capacity)
        self._buffers = StepBuffers(limits, device=kv.data.device)
        executor = kernels.executor(self.program, self._buffers.inputs, model.store, kv)
        is_copied = executor.output.device.type != "cpu"
        self._executor: Executor = OutputOnHost(executor) if is_copied else executor
        output = self._executor.output
        self._logits = tuple(row.numpy() for row in output)
        self._draws = self._executor.token_draws(
            vocab_size=model.config.vocab_size if vocab_size is None else vocab_size
        )
        self.read_bytes = 4 * output.shape[1] if is_copied else 4
        self._last_rows: tuple[tuple[int, ...], tuple[npt.NDArray[np.float32], ...]] = ((), ())
        self._bound: Binding | None = None

    def is_valid_for(self, key: PlanKey) -> bool:
        """Whether this plan may run steps of `key`."""
        return self.key is key or self.key == key

    def bind(self, rows: Sequence[Row], key: PlanKey) -> Binding:
        """Writes one step's inputs into the plan's buffers.

        A refused step can't run and seats no session; what it wrote is written again by the next one.

        Args:
            rows: Of one step.
            key: What the step belongs to.

        Returns:
            Which of the logits belong to which row, and what was written.

        Raises:
            StalePlan: The plan was built for another key.
            StepTooLarge: The step exceeds a limit of the key.
            ValueError: A row's values are wrong.
        """
        self._bound = None
        if not self.is_valid_for(key):
            raise StalePlan(self.key.differences(key))
        self._bound = self._buffers.bind(rows)
        return self._bound

    def run(self) -> int:
        """Replays the plan over what was bound last, once.

        Returns:
            Of its time, what was inside kernels, each as its longest thread took it, in ns; 0: not measured.

        Raises:
            RuntimeError: Nothing was bound since the last run.
        """
        bound = self._take_bound()
        return self._executor.run(bound.num_tokens, bound.num_rows, bound.num_logits)

    def run_and_draw(self) -> DrawnRun:
        """As `run`, and draws what was prepared for that binding, from the logits where they lie.

        Raises:
            RuntimeError: Nothing was bound since the last run.
        """
        num_tokens, num_rows, num_logits, _, _ = self._take_bound()
        return self._draws.run_and_draw(num_tokens, num_rows, num_logits)

    def _take_bound(self) -> Binding:
        bound, self._bound = self._bound, None
        if bound is None:
            raise RuntimeError("run without bind: a plan replays each binding once")
        self.realize_count += 1
        return bound

    def logits_of(self, bound: Binding) -> tuple[npt.NDArray[np.float32], ...]:
        """Where a replay leaves the logits, [vocab] float32 for each row that wants them.

        Views into memory of the plan's own, good from a replay until the next one.
        """
        places, rows = self._last_rows
        if bound.places is not places:
            rows = tuple(self._logits[place] for place in bound.places)
            self._last_rows = bound.places, rows
        return rows

    def prepare_draws(self, bound: Binding, draws: Sequence[Draw]) -> int:
        """Takes what the tokens of a binding are drawn by, before it runs.

        Args:
            bound: What was bound last.
            draws: One for each row that wants logits, in the order given to `bind`.

        Returns:
            Bytes that were written for native code.

        Raises:
            ValueError: Draws are not as many, or penalties depend on a token that is not known yet.
        """
        return self._draws.prepare(bound.places, draws)
