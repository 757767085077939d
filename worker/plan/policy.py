"""Which plan a step runs on: a held one, or one made for this step alone."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from time import monotonic_ns
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.batch import DecodePlan, Drawn, PlanAction, Row, RowResult, TokenClass
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.plan.buffers import Binding
from worker.plan.decode_session import PagedDecodeSession, PlanKey
from worker.plan.executor import Kernels
from worker.sampling import Draw

MAX_HELD_PLANS = 4
"""Plans held at a time. A worker's steps need one; keys of other limits are a caller's own."""


class StepLogits(NamedTuple):
    """What a step computed, and what it cost.

    Attributes:
        rows: Of each row that wants logits, in the order given, [vocab] float32: views into the plan's own
            memory, good until its next run. They may be written.
        results: One per row of the step, all the same.
    """

    rows: tuple[npt.NDArray[np.float32], ...]
    results: tuple[RowResult, ...]

    @property
    def logits(self) -> Tensor:
        """A copy of the rows, [n, vocab] float32."""
        return torch.from_numpy(np.stack(self.rows)) if self.rows else torch.empty(0, 0)


class StepDraws(NamedTuple):
    """What came of a launched step.

    Attributes:
        drawn: One per row that wants logits, in the order of the rows; None where no token can be told: a
            logit is NaN or infinite, or all ids are banned.
        results: One per row of the step.
        sample_ns: Time to draw, where the host waits for it; in native code as its longest thread took it.
        logits: Where kernels run on the host, what was drawn from, as `StepLogits.rows`. Elsewhere nothing.
    """

    drawn: Sequence[Drawn | None]
    results: tuple[RowResult, ...]
    sample_ns: int
    logits: tuple[npt.NDArray[np.float32], ...] = ()

    def read(self) -> "StepDraws":
        """See `Launched`: a step that ran where it was launched is read already."""
        return self


class Plan(Protocol):
    """What is held."""

    @property
    def key(self) -> PlanKey:
        """What it was built for."""


P = TypeVar("P", bound=Plan)


class HeldPlans(Generic[P]):
    """Holds a few plans and counts how steps got theirs.

    Plans of another model or pool than a step's are let go before one is built: their memory is not wanted
    any more. Beyond `MAX_HELD_PLANS` the plan that went unused longest goes.

    Args:
        kernels: Name of what runs programs.
        max_step_tokens: Tokens that a step may hold.
        max_step_rows: Rows that a step may hold.

    Attributes:
        builds: Steps, or warm-ups, that built a held plan.
        reuses: Steps that replayed one.
        replans: Steps that built a plan of their own.
        drop_reasons: For each key field, how often its change made held plans be let go, and under
            `least_recently_used` how often the bound did.
    """

    def __init__(self, kernels: str, *, max_step_tokens: int, max_step_rows: int) -> None:
        self._kernels_name = kernels
        self._max_step_tokens = max_step_tokens
        self._max_step_rows = max_step_rows
        self._held: OrderedDict[PlanKey, P] = OrderedDict()
        self._last_held: P | None = None
        self._last_key: PlanKey | None = None
        self.builds = 0
        self.reuses = 0
        self.replans = 0
        self.drop_reasons: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        """Plans that are held now."""
        return len(self._held)

    def build(self, model: LlamaModel, kv: KvStorage, key: PlanKey) -> P:
        """Makes a plan of a key. Of those who hold plans of their kind."""
        raise NotImplementedError

    def key(self, model: LlamaModel, kv: KvStorage, token_class: TokenClass = TokenClass.DECODE) -> PlanKey:
        """What a plan for steps of `model` over `kv` must have been built for."""
        last = self._last_key
        if (
            last is not None
            and last.model_instance_id == model.instance_id
            and last.kv_allocation_id == kv.allocation_id
            and last.token_class is token_class
        ):
            return last  # sizes and dtype are theirs for life
        self._last_key = PlanKey.of(
            model,
            kv,
            kernels=self._kernels_name,
            max_step_tokens=self._max_step_tokens,
            max_step_rows=self._max_step_rows,
            token_class=token_class,
        )
        return self._last_key

    def held_plan(self, model: LlamaModel, kv: KvStorage, key: PlanKey) -> tuple[P, PlanAction]:
        """The held plan of a key, built if there is none.

        Returns:
            The plan, and BUILT or REUSED.
        """
        action = PlanAction.REUSED
        if (plan := self._held.get(key)) is None:
            self._let_go(key)
            plan, action = self.build(model, kv, key), PlanAction.BUILT
            self._held[key] = plan
            self.builds += 1
        self._held.move_to_end(key)
        # Steps know the plan by the identity of its own key, whatever keys there were in between.
        self._last_held, self._last_key = plan, plan.key
        return plan, action

    def _let_go(self, key: PlanKey) -> None:
        """Makes room for a plan of `key`; nobody comes back for one of another model or pool."""
        self._last_held = None
        for held in tuple(self._held):
            owners = {"model_instance_id", "kv_allocation_id"} & set(differences := held.differences(key))
            if owners:
                self.drop_reasons.update(differences)
                del self._held[held]
        if len(self._held) >= MAX_HELD_PLANS:
            self.drop_reasons["least_recently_used"] += 1
            self._held.popitem(last=False)


class PlanPolicy(HeldPlans[PagedDecodeSession]):
    """Runs steps on the CPU, each on the plan that its mode wants.

    Args:
        kernels: What runs programs.
        max_step_tokens: Tokens that a step may hold.
        max_step_rows: Rows that a step may hold.
        vocab_size: Ids from here on are padding, and never drawn; None: the model has no such.
    """

    def __init__(
        self, *, kernels: Kernels, max_step_tokens: int, max_step_rows: int, vocab_size: int | None = None
    ) -> None:
        super().__init__(kernels.name, max_step_tokens=max_step_tokens, max_step_rows=max_step_rows)
        self._kernels = kernels
        self._vocab_size = vocab_size

    def build(self, model: LlamaModel, kv: KvStorage, key: PlanKey) -> PagedDecodeSession:
        """Makes a plan of a key."""
        return PagedDecodeSession(model, kv, key, self._kernels, vocab_size=self._vocab_size)

    def _plan_for(
        self, rows: Sequence[Row], plan: DecodePlan, model: LlamaModel, kv: KvStorage, key: PlanKey
    ) -> tuple[PagedDecodeSession, PlanAction]:
        if plan is DecodePlan.REPLAN or key not in self._held:
            key.limits(model.config.vocab_size).check(rows)  # before anything is built
        if plan is DecodePlan.REPLAN:
            return self.build(model, kv, key), PlanAction.REPLANNED
        return self.held_plan(model, kv, key)

    def forward_paged_step_persistent(
        self, rows: Sequence[Row], plan: DecodePlan, model: LlamaModel, kv: KvStorage
    ) -> StepLogits:
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
        session, action, bound = self._bind(rows, plan, model, kv)
        logits = session.logits_of(bound)
        host_bytes = bound.num_bytes + bound.num_logits * session.read_bytes
        self._count(action)
        bound_ns = monotonic_ns()
        kernel_ns = session.run()
        step_ns = monotonic_ns() - bound_ns
        return StepLogits(
            logits,
            _results(session, action, len(rows), bound_ns - start_ns, step_ns, kernel_ns, host_bytes),
        )

    def draw_paged_step_persistent(
        self,
        rows: Sequence[Row],
        plan: DecodePlan,
        model: LlamaModel,
        kv: KvStorage,
        draws: Sequence[Draw],
    ) -> StepDraws:
        """Runs one step as `forward_paged_step_persistent` does, and draws its tokens.

        Args:
            rows: Of one step.
            plan: Mode of all of them.
            model: The model.
            kv: The pool; written.
            draws: One for each row that wants logits, in the order of the rows.

        Raises:
            StepTooLarge: As there.
            ValueError: As there, or draws are not as many as rows that want logits; nothing ran.
        """
        start_ns = monotonic_ns()
        session, action, bound = self._bind(rows, plan, model, kv)
        # What can be is made ready now: after the run caches hold the last weights and nothing else.
        logits, num_rows = session.logits_of(bound), len(rows)
        host_bytes = bound.num_bytes + bound.num_logits * session.read_bytes
        host_bytes += session.prepare_draws(bound, draws)
        self._count(action)
        bound_ns = monotonic_ns()
        kernel_ns, draw_ns, drawn = session.run_and_draw()
        step_ns = max(0, monotonic_ns() - bound_ns - draw_ns)  # two clocks
        plan_ns = bound_ns - start_ns
        results = _results(session, action, num_rows, plan_ns, step_ns, kernel_ns, host_bytes)
        return StepDraws(drawn, results, draw_ns, logits)

    def _bind(
        self, rows: Sequence[Row], plan: DecodePlan, model: LlamaModel, kv: KvStorage
    ) -> tuple[PagedDecodeSession, PlanAction, Binding]:
        """Gets the step's plan and binds the rows to it."""
        key = self.key(model, kv)
        session = self._last_held
        if plan is DecodePlan.PLAN_ONCE and session is not None and session.key is key:
            action = PlanAction.REUSED
        else:
            session, action = self._plan_for(rows, plan, model, kv, key)
        return session, action, session.bind(rows, key)

    def _count(self, action: PlanAction) -> None:
        if action is PlanAction.REUSED:
            self.reuses += 1
        elif action is PlanAction.REPLANNED:
            self.replans += 1


def _results(
    session: PagedDecodeSession,
    action: PlanAction,
    num_rows: int,
    plan_ns: int,
    step_ns: int,
    kernel_ns: int,
    host_bytes: int,
) -> tuple[RowResult, ...]:
    program = session.program
    launches, arena_bytes = len(program.launches), program.arena_bytes
    return (
        RowResult(action, plan_ns, step_ns, kernel_ns, launches, host_bytes, arena_bytes, num_rows),
    ) * num_rows
