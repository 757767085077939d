"""Which plan a step runs on: the held one, or one made for this step alone."""

from collections import Counter
from dataclasses import dataclass
from time import monotonic_ns

from torch import Tensor

from worker.batch import DecodePlan, PlanAction
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.plan.decode_session import PagedDecodeSession, PlanKey
from worker.plan.graph import StepInputs


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step's logits and what its plan cost.

    Attributes:
        logits: [L, vocab] float32, in host memory.
        action: How the step got its plan.
        plan_ns: Time to trace, lower and bind.
        step_ns: Time to run.
        launches: Kernel launches.
        host_bytes: Bytes of inputs and logits.
    """

    logits: Tensor
    action: PlanAction
    plan_ns: int
    step_ns: int
    launches: int
    host_bytes: int


class PlanPolicy:
    """Holds at most one plan and counts how steps got theirs.

    Attributes:
        builds: Steps, or warm-ups, that built the held plan.
        reuses: Steps that replayed it.
        replans: Steps that built a plan of their own.
        rebuild_reasons: For each key field, how often its change made a held plan be built again.
    """

    def __init__(self, *, kernels: str, max_step_tokens: int, max_step_rows: int) -> None:
        self._kernels = kernels
        self._max_step_tokens = max_step_tokens
        self._max_step_rows = max_step_rows
        self._held: PagedDecodeSession | None = None
        self.builds = 0
        self.reuses = 0
        self.replans = 0
        self.rebuild_reasons: Counter[str] = Counter()

    def key(self, model: LlamaModel, kv: KvStorage) -> PlanKey:
        """What a plan for steps of `model` over `kv` must have been built for."""
        return PlanKey.of(
            model,
            kv,
            kernels=self._kernels,
            max_step_tokens=self._max_step_tokens,
            max_step_rows=self._max_step_rows,
        )

    def held_plan(self, model: LlamaModel, kv: KvStorage) -> tuple[PagedDecodeSession, PlanAction]:
        """The plan that PLAN_ONCE steps run on, built if there is none for this model and pool.

        Returns:
            The plan, and BUILT or REUSED.
        """
        key = self.key(model, kv)
        if self._held is not None and self._held.is_valid_for(key):
            return self._held, PlanAction.REUSED
        if self._held is not None:
            self.rebuild_reasons.update(self._held.key.differences(key))
            self._held = None
        self._held = PagedDecodeSession(model, kv, key)
        self.builds += 1
        return self._held, PlanAction.BUILT

    def forward_paged_step_persistent(
        self, inputs: StepInputs, plan: DecodePlan, model: LlamaModel, kv: KvStorage
    ) -> PlannedStep:
        """Runs one step.

        PLAN_ONCE binds and replays the held plan, building it on first use. REPLAN uses nothing held: it
        traces, lowers, runs and discards, which makes it the reference that held plans are compared with.

        Raises:
            StepTooLarge: The step exceeds what plans are built for; nothing ran.
        """
        start_ns = monotonic_ns()
        if plan is DecodePlan.REPLAN:
            session, action = PagedDecodeSession(model, kv, self.key(model, kv)), PlanAction.REPLANNED
        else:
            session, action = self.held_plan(model, kv)
        session.bind(inputs, self.key(model, kv))
        bound_ns = monotonic_ns()
        # On the CPU a no-op; elsewhere it waits for the launches, so that their time is counted.
        logits = session.run().cpu()
        end_ns = monotonic_ns()
        self.reuses += action is PlanAction.REUSED
        self.replans += action is PlanAction.REPLANNED
        return PlannedStep(
            logits=logits,
            action=action,
            plan_ns=bound_ns - start_ns,
            step_ns=end_ns - bound_ns,
            launches=session.launches,
            host_bytes=inputs.num_bytes + logits.nbytes,
        )
