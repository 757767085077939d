"""Runs batches of one model over one pool and hands back logits. Draws no tokens and keeps no sessions."""

from collections.abc import Sequence

import torch

from worker.batch import Batch, DecodePlan, Row
from worker.kernels.ops import implementations
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.plan.decode_session import step_program
from worker.plan.executor import kernels_named
from worker.plan.policy import PlanPolicy, StepLogits
from worker.plan.program import Capacity, Constant


class RowsNotInvariant(RuntimeError):
    """The linear kernel gave a row other bits beside other rows; this machine's workers could not agree."""


class Runner:
    """Runs batches of one model over one pool.

    Args:
        model: The model.
        kv: Storage with the model's layers and heads.
        kernels: One of `worker.kernels.ops.KERNELS`.
        max_step_tokens: Most tokens of a batch.
        max_step_rows: Most rows of a batch.
        num_threads: Threads of `native` kernels; the others use those of torch.

    Raises:
        ValueError: A limit is below 1, `kv` is not of the model's sizes, or `kernels` is unknown.
        KernelsUnsuitable: The native kernels do not suit the model's sizes or the pool's device.
        ImportError: `native` without the distribution `pagecast-native`.
    """

    def __init__(
        self,
        model: LlamaModel,
        kv: KvStorage,
        *,
        kernels: str,
        max_step_tokens: int,
        max_step_rows: int,
        num_threads: int = 1,
    ) -> None:
        for name, limit in (("max_step_tokens", max_step_tokens), ("max_step_rows", max_step_rows)):
            if limit < 1:
                raise ValueError(f"{name}={limit} is below 1")
        for name in ("num_layers", "num_kv_heads", "head_size"):
            if getattr(kv, name) != getattr(model.config, name):
                raise ValueError(
                    f"kv.{name}={getattr(kv, name)}, the model's is {getattr(model.config, name)}"
                )
        chosen = kernels_named(kernels, num_threads=num_threads)
        chosen.check(model.config, kv)
        self._model = model
        self._kv = kv
        self._kernels = kernels
        self._policy = PlanPolicy(
            kernels=chosen,
            max_step_tokens=max_step_tokens,
            max_step_rows=max_step_rows,
        )

    @property
    def builds(self) -> int:
        """Plans that were built to be held, by steps or by `warm_up`."""
        return self._policy.builds

    @property
    def reuses(self) -> int:
        """Program runs that replayed a held plan."""
        return self._policy.reuses

    @property
    def replans(self) -> int:
        """Program runs on a plan of their own."""
        return self._policy.replans

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Checks the linear kernel, builds the held plan and runs it once, so that no user pays for it.

        Native kernels are row-invariant by construction and not checked. The dummy step writes to block 0
        and restores it.

        Raises:
            RowsNotInvariant: The linear kernel's rows depend on each other here.
        """
        if self._kernels != "native":
            self._check_row_invariance()
        row = Row("", (0,), 0, (0,), wants_logits=True, plan=DecodePlan.PLAN_ONCE)
        saved = self._kv.data[0].clone()
        self._policy.forward_paged_step_persistent((row,), row.plan, self._model, self._kv)
        self._kv.data[0] = saved

    def release_plain_weights(self) -> None:
        """Lets go of the plain copy of every weight that native kernels hold in packed form."""
        self._model.store.release_plain()

    def _check_row_invariance(self) -> None:
        linear = implementations(self._kernels)["linear"]
        program = step_program(self._model, self._kv, Capacity(num_tokens=1, num_rows=1, max_blocks=1))
        weights = (
            self._model.store.stacked(argument.parts)
            for launch in program.launches
            if launch.operator in ("linear", "linear_swiglu")
            for argument in launch.arguments
            if isinstance(argument, Constant)
        )
        of_shape = {tuple(weight.shape): weight for weight in weights}
        generator = torch.Generator().manual_seed(0)
        for shape, weight in of_shape.items():
            x = torch.randn(37, shape[1], generator=generator).to(weight.device)
            alone = torch.cat([linear(x[row : row + 1], weight) for row in (0, 15, 16, 36)])
            if not torch.equal(linear(x, weight)[[0, 15, 16, 36]], alone):
                raise RowsNotInvariant(f"linear {shape}: a row alone has other bits than among 37 rows")

    def run(self, batch: Batch) -> StepLogits:
        """Computes a batch: stores the KV of its tokens and returns the logits that rows want.

        Args:
            batch: Rows of one step, all of one plan mode: `Batch.turns` cuts others.

        Raises:
            StepTooLarge: The batch, or a row's context, is over a limit; nothing ran.
            ValueError: A row's values are wrong, or rows are of several plan modes; nothing ran.
        """
        rows = batch.rows
        plan = rows[0].plan if rows else DecodePlan.PLAN_ONCE
        for row in rows:
            if row.plan is not plan:
                raise ValueError("rows are of several plan modes; each mode's rows are a turn of their own")
        return self._policy.forward_paged_step_persistent(rows, plan, self._model, self._kv)

    @torch.inference_mode()
    def zero(self, blocks: Sequence[int]) -> None:
        """Overwrites blocks whose numbers can't be trusted. Raises ValueError for one that is not there."""
        self._kv.zero(blocks)
