"""Runs batches of one model over one pool and draws their tokens. Keeps no sessions and knows no text."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from worker.batch import Batch, DecodePlan, Row
from worker.kernels.ops import implementations
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.model.weights.store import Activations
from worker.plan.decode_session import step_program
from worker.plan.device_policy import DeviceKernels, DevicePolicy, DeviceStep
from worker.plan.draw_params import fits_device, runs_ahead
from worker.plan.executor import kernels_named
from worker.plan.launched import DeviceLaunched, Launched
from worker.plan.policy import PlanPolicy, StepDraws, StepLogits
from worker.plan.program import Capacity, Constant
from worker.sampling import Draw

__all__ = ["Launched", "RowsNotInvariant", "Runner", "StepDraws"]


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
        thread_cpus: The CPU that each of them stays on, whoever runs steps being the first; empty: any.
        activations: What products are made of: "float32", or with `native` kernels "int8" or "bfloat16".
        vocab_size: Ids from here on are padding of the embedding, and never drawn. None: there are none.

    Raises:
        ValueError: A limit is below 1, `kv` is not of the model's sizes, or `kernels` is unknown.
        KernelsUnsuitable: The kernels do not suit the model's sizes or the pool's device.
        ImportError: `native` without the distribution `pagecast-native`.
        RuntimeError: Triton's kernels can't run in this process as it was prepared.
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
        thread_cpus: Sequence[int] = (),
        activations: Activations = "float32",
        vocab_size: int | None = None,
    ) -> None:
        for name, limit in (("max_step_tokens", max_step_tokens), ("max_step_rows", max_step_rows)):
            if limit < 1:
                raise ValueError(f"{name}={limit} is below 1")
        for name in ("num_layers", "num_kv_heads", "head_size"):
            if getattr(kv, name) != getattr(model.config, name):
                raise ValueError(
                    f"kv.{name}={getattr(kv, name)}, the model's is {getattr(model.config, name)}"
                )
        most = model.config.vocab_size
        self._vocab_size = most if vocab_size is None else vocab_size
        if not 1 <= self._vocab_size <= most:
            raise ValueError(f"vocab_size={vocab_size} is not in 1..{most}")
        chosen = kernels_named(
            kernels,
            num_threads=num_threads,
            thread_cpus=thread_cpus,
            activations=activations,
            device=kv.data.device,
        )
        chosen.check(model.config, kv)
        self._model = model
        self._kv = kv
        self._kernels = kernels
        limits = {"max_step_tokens": max_step_tokens, "max_step_rows": max_step_rows}
        self._device: DevicePolicy | None = None
        self._policy: PlanPolicy | DevicePolicy
        if isinstance(chosen, DeviceKernels):
            self._policy = self._device = DevicePolicy(kernels=chosen, vocab_size=self._vocab_size, **limits)
        else:
            self._policy = self._host = PlanPolicy(kernels=chosen, vocab_size=self._vocab_size, **limits)

    @property
    def has_token_classes(self) -> bool:
        """Whether the rows of a batch must be of one token class; otherwise classes make no difference."""
        return self._device is not None

    def runs_ahead(self, draws: Sequence[Draw]) -> bool:
        """Whether a next step may be launched before one with these draws is read.

        Its rows may then end with `UNKNOWN_TOKEN`: the device draws these tokens and knows them.
        """
        return self._device is not None and all(runs_ahead(draw) for draw in draws)

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
        """Checks the linear kernel, builds what is held and runs it once, so that no user pays for it.

        Native kernels are row-invariant by construction and not checked, nor are Triton's. On a CPU the dummy
        step writes to block 0 and restores it; a device captures launch lists of all sizes.

        Raises:
            RowsNotInvariant: The linear kernel's rows depend on each other here.
        """
        if self._device is not None:
            self._device.warm_up(self._model, self._kv)
            return
        if self._kernels != "native":
            self._check_row_invariance()
        row = Row("", (0,), 0, (0,), wants_logits=True, plan=DecodePlan.PLAN_ONCE)
        saved = self._kv.data[0].clone()
        self._host.forward_paged_step_persistent((row,), row.plan, self._model, self._kv)
        self._kv.data[0] = saved

    @property
    def widened_weights(self) -> tuple[tuple[str, ...], ...]:
        """Names of matrices that are multiplied together and had to be packed as float32, stack by stack."""
        return self._model.store.widened

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
            batch: Rows of one step, all of one plan mode and, where the kernels have them, one token class:
                `Batch.turns` cuts others.

        Raises:
            StepTooLarge: The batch, or a row's context, is over a limit; nothing ran.
            ValueError: A row's values are wrong, or rows are of several plan modes or token classes; nothing
                ran.
        """
        rows, plan = batch.rows, self._mode_of(batch.rows)
        if self._device is None:
            return self._host.forward_paged_step_persistent(rows, plan, self._model, self._kv)
        num_logits = sum(row.wants_logits for row in rows)
        step = self._launch(self._device, rows, plan, [None] * num_logits, range(num_logits))
        landed, results = step.read()
        return StepLogits(tuple(landed.logits[place] for place in range(num_logits)), results)

    def launch(self, batch: Batch, draws: Sequence[Draw]) -> Launched:
        """Starts a step that draws tokens.

        Where kernels run on the host all is done when this returns. On a device another step may be launched
        before this one is read, but no third.

        Args:
            batch: As for `run`. The last token of a row may be `UNKNOWN_TOKEN` where the step before drew it
                and `runs_ahead` allows it.
            draws: One per row that wants logits, in the order of the rows.

        Raises:
            StepTooLarge, ValueError: As `run`.
            RuntimeError: Two steps are not read yet; nothing ran.
        """
        rows, plan = batch.rows, self._mode_of(batch.rows)
        if self._device is None:
            return self._host.draw_paged_step_persistent(rows, plan, self._model, self._kv, draws)
        num_logits = sum(row.wants_logits for row in rows)
        if len(draws) != num_logits:
            raise ValueError(f"draws has {len(draws)}, the batch has {num_logits} rows that want logits")
        on_host = [place for place, draw in enumerate(draws) if not fits_device(draw)]
        on_device = [None if place in on_host else draw for place, draw in enumerate(draws)]
        started = self._launch(self._device, rows, plan, on_device, on_host)
        return DeviceLaunched(started, draws, on_host, self._vocab_size)

    def _mode_of(self, rows: Sequence[Row]) -> DecodePlan:
        first = rows[0] if rows else None
        plan = DecodePlan.PLAN_ONCE if first is None else first.plan
        for row in rows:
            if row.plan is not plan:
                raise ValueError("rows are of several plan modes; each mode's rows are a turn of their own")
        if self._device is not None and first is not None:
            for row in rows:
                if row.token_class is not first.token_class:
                    raise ValueError("rows are of several token classes; each class's rows are a turn")
        return plan

    @torch.inference_mode()
    def _launch(
        self,
        device: DevicePolicy,
        rows: Sequence[Row],
        plan: DecodePlan,
        draws: Sequence[Draw | None],
        copied: Sequence[int],
    ) -> DeviceStep:
        return device.launch_paged_step(
            rows,
            plan,
            self._model,
            self._kv,
            draws,
            copied=copied,
            wants_logprobs=any(draw is not None and draw.sampling.logprobs is not None for draw in draws),
        )

    @torch.inference_mode()
    def zero(self, blocks: Sequence[int]) -> None:
        """Overwrites blocks whose numbers can't be trusted. Raises ValueError for one that is not there."""
        with self.in_order():
            self._kv.zero(blocks)

    def check_device(self) -> None:
        """Waits for steps that were launched; after one that failed, to know whether others can run.

        Raises:
            DeviceLost: No step can run in this process any more.
        """
        if self._device is not None:
            self._device.device.check()

    def in_order(self) -> AbstractContextManager[None]:
        """What is asked of the pool inside comes after the steps launched before, and before later ones."""
        return nullcontext() if self._device is None else self._device.device.in_order()
