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
        drawn: One per row that wants logits, in the order given; None where no token can be told: a logit is
            NaN or infinite, or all ids are banned. Empty where no draws were given.
        sample_ns: Time to draw.
    """

    rows: tuple[npt.NDArray[np.float32], ...]
    results: tuple[RowResult, ...]
    drawn: Sequence[Drawn | None] = ()
    sample_ns: int = 0

    @property
    def logits(self) -> Tensor:
        """A copy of the rows, [n, vocab] float32."""
        return torch.from_numpy(np.stack(self.rows)) if self.rows else torch.empty(0, 0)


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
        self,
        rows: Sequence[Row],
        plan: DecodePlan,
        model: LlamaModel,
        kv: KvStorage,
        draws: Sequence[Draw] | None = None,
    ) -> StepLogits:
        """Runs one step, and draws its tokens where draws are given.

        PLAN_ONCE binds and replays a held plan, building it on first use. REPLAN uses nothing held: it
        traces, lowers, runs and discards, which makes it the reference that held plans are compared with.
        Only packed weights and kernels are those of all plans.

        Args:
            rows: Of one step, as `StepLimits.check` wants them.
            plan: Mode of all of them.
            model: The model.
            kv: The pool; written.
            draws: One for each row that wants logits, in the order of the rows.

        Raises:
            StepTooLarge: The step exceeds what plans are built for; nothing was built and nothing ran.
            ValueError: A row's values are wrong; likewise. Draws are not as many as rows that want logits;
                nothing ran.
        """
        start_ns = monotonic_ns()
        key = self.key(model, kv)
        session = self._last_held
        if plan is DecodePlan.PLAN_ONCE and session is not None and session.key is key:
            action = PlanAction.REUSED
        else:
            session, action = self._plan_for(rows, plan, model, kv, key)
        bound = session.bind(rows, key)
        # What can be is made ready now: after the run caches hold the last weights and nothing else.
        logits = session.logits_of(bound)
        program, num_rows = session.program, len(rows)
        launches, arena_bytes = len(program.launches), program.arena_bytes
        host_bytes = bound.num_bytes + bound.num_logits * session.read_bytes
        if draws is not None:
            host_bytes += session.prepare_draws(bound, draws)
        bound_ns = monotonic_ns()
        kernel_ns = session.run()
        end_ns = monotonic_ns()
        self.reuses += action is PlanAction.REUSED
        self.replans += action is PlanAction.REPLANNED
        result = RowResult(
            plan_action=action,
            plan_ns=bound_ns - start_ns,
            step_ns=end_ns - bound_ns,
            kernel_ns=kernel_ns,
            launches=launches,
            host_bytes=host_bytes,
            arena_bytes=arena_bytes,
            batch_size=num_rows,
        )
        results = (result,) * num_rows
        if draws is None:
            return StepLogits(logits, results)
        drawn = session.draw()
        return StepLogits(logits, results, drawn, monotonic_ns() - end_ns)
