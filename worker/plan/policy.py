"""Which plan a step runs on: a held one, or one made for this step alone."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic_ns

import numpy as np
import numpy.typing as npt

from worker.batch import DecodePlan, PlanAction, Row
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.plan.decode_session import PagedDecodeSession, PlanKey
from worker.plan.executor import Kernels

MAX_HELD_PLANS = 4
"""Plans held at a time: a worker needs one per set of limits that its steps come with."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step's logits and what its plan cost.

    Attributes:
        logits: Of each row that wants them, in the order given, [vocab] float32: views into the plan's
            memory, good until its next run.
        action: How the step got its plan.
        plan_ns: Time to get the plan (trace, optimise, lower) and bind.
        step_ns: Time to run.
        kernel_ns: Of `step_ns`, the time inside kernels, each as its longest thread took it; 0: not
            measured.
        launches: Kernel launches.
        host_bytes: Bytes of inputs that were written, and of what is read of the logits: an id per row that
            a token is drawn for, all of them where they are copied from a device.
        arena_bytes: Size of the program's arena.
    """

    logits: tuple[npt.NDArray[np.float32], ...]
    action: PlanAction
    plan_ns: int
    step_ns: int
    kernel_ns: int
    launches: int
    host_bytes: int
    arena_bytes: int


class PlanPolicy:
    """Holds a few plans and counts how steps got theirs.

    Plans of another model or pool than a step's are let go before one is built: their memory is not wanted
    any more. Beyond `MAX_HELD_PLANS` the plan that went unused longest goes.

    Args:
        kernels: What runs programs.
        max_step_tokens: Tokens that a step may hold.
        max_step_rows: Rows that a step may hold.

    Attributes:
        builds: Steps, or warm-ups, that built a held plan.
        reuses: Steps that replayed one.
        replans: Steps that built a plan of their own.
        drop_reasons: For each key field, how often its change made held plans be let go, and under
            `least_recently_used` how often the bound did.
    """

    def __init__(self, *, kernels: Kernels, max_step_tokens: int, max_step_rows: int) -> None:
        self._kernels = kernels
        self._max_step_tokens = max_step_tokens
        self._max_step_rows = max_step_rows
        self._held: OrderedDict[PlanKey, PagedDecodeSession] = OrderedDict()
        self._last_key: PlanKey | None = None
        self.builds = 0
        self.reuses = 0
        self.replans = 0
        self.drop_reasons: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        """Plans that are held now."""
        return len(self._held)

    def key(self, model: LlamaModel, kv: KvStorage) -> PlanKey:
        """What a plan for steps of `model` over `kv` must have been built for."""
        last = self._last_key
        if last is not None and (model.instance_id, kv.allocation_id) == last.owners:
            return last  # sizes and dtype are theirs for life
        self._last_key = PlanKey.of(
            model,
            kv,
            kernels=self._kernels.name,
            max_step_tokens=self._max_step_tokens,
            max_step_rows=self._max_step_rows,
        )
        return self._last_key

    def held_plan(
        self, model: LlamaModel, kv: KvStorage, key: PlanKey
    ) -> tuple[PagedDecodeSession, PlanAction]:
        """The held plan of a key, built if there is none.

        Returns:
            The plan, and BUILT or REUSED.
        """
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key], PlanAction.REUSED
        self._let_go(key)
        plan = self._held[key] = PagedDecodeSession(model, kv, key, self._kernels)
        self.builds += 1
        return plan, PlanAction.BUILT

    def _let_go(self, key: PlanKey) -> None:
        """Makes room for a plan of `key`; nobody comes back for one of another model or pool."""
        for held in tuple(self._held):
            owners = {"model_instance_id", "kv_allocation_id"} & set(differences := held.differences(key))
            if owners:
                self.drop_reasons.update(differences)
                del self._held[held]
        if len(self._held) >= MAX_HELD_PLANS:
            self.drop_reasons["least_recently_used"] += 1
            self._held.popitem(last=False)

    def forward_paged_step_persistent(
        self, rows: Sequence[Row], plan: DecodePlan, model: LlamaModel, kv: KvStorage
    ) -> PlannedStep:
        """Runs one step.

        PLAN_ONCE binds and replays a held plan, building it on first use. REPLAN uses nothing held: it
        traces, lowers, runs and discards, which makes it the reference that held plans are compared with.
        Only packed weights and kernels are those of all plans.

        Args:
            rows: Of one step, as `StepLimits.check` wants them.
            plan: Mode of all of them.
            model: The model.
            kv: The pool; written.

        Raises:
            StepTooLarge: The step exceeds what plans are built for; nothing was built and nothing ran.
            ValueError: A row's values are wrong; likewise.
        """
        start_ns = monotonic_ns()
        key = self.key(model, kv)
        if plan is DecodePlan.REPLAN or key not in self._held:
            key.limits(model.config.vocab_size).check(rows)
        if plan is DecodePlan.REPLAN:
            session, action = PagedDecodeSession(model, kv, key, self._kernels), PlanAction.REPLANNED
        else:
            session, action = self.held_plan(model, kv, key)
        bound = session.bind(rows, key)
        bound_ns = monotonic_ns()
        live = session.run()
        host_logits, num_copied = session.host_logits, 0
        if host_logits is None:  # the copy waits for the launches, so that their time is counted
            host_logits, num_copied = tuple(row.numpy() for row in live.cpu()), live.nbytes
        end_ns = monotonic_ns()
        self.reuses += action is PlanAction.REUSED
        self.replans += action is PlanAction.REPLANNED
        return PlannedStep(
            logits=tuple(host_logits[place] for place in bound.places if place is not None),
            action=action,
            plan_ns=bound_ns - start_ns,
            step_ns=end_ns - bound_ns,
            kernel_ns=session.kernel_ns,
            launches=len(session.program.launches),
            host_bytes=bound.num_bytes + (num_copied or 4 * bound.num_logits),
            arena_bytes=session.program.arena_bytes,
        )
