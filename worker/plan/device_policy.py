"""Steps on a device, each on the plan of its mode and token class. Launches them; who asked reads them."""

from collections.abc import Sequence
from time import monotonic_ns

from worker.batch import DecodePlan, PlanAction, Row, RowResult, TokenClass
from worker.kv.storage import KvStorage
from worker.model.config import LlamaConfig
from worker.model.llama import LlamaModel
from worker.plan.decode_session import PlanKey
from worker.plan.device import Device
from worker.plan.device_session import DeviceDecodeSession
from worker.plan.executor import KernelsUnsuitable
from worker.plan.flight import Flight, Landed
from worker.plan.launchers import Launchers
from worker.plan.policy import HeldPlans
from worker.plan.rows import StepLimits
from worker.plan.staging import Staging
from worker.sampling import Draw

MAX_IN_FLIGHT = 2
"""Steps that may be launched and not read: the one whose ids the host waits for, and the next."""


class DeviceKernels:
    """Kernels of a device, and the device.

    Args:
        device: Where they run.
        launchers: What is launched.
    """

    def __init__(self, device: Device, launchers: Launchers) -> None:
        self.device = device
        self.launchers = launchers

    @property
    def name(self) -> str:
        """Tells apart kernels that could give other bits; part of a plan's key."""
        return self.launchers.name

    def check(self, config: LlamaConfig, kv: KvStorage) -> None:
        """Raises KernelsUnsuitable where a model over a pool can't be run."""
        where, wanted = kv.data.device, self.device.torch_device
        if where != wanted:
            raise KernelsUnsuitable(f"the pool is on {where}, the kernels run on {wanted}")
        if reason := self.launchers.unsuitable(config, kv):
            raise KernelsUnsuitable(reason)


class DeviceStep:
    """A step that was launched: `read` it once, in the order of launches."""

    def __init__(
        self, policy: "DevicePolicy", flight: Flight, *, result: RowResult, launched_ns: int
    ) -> None:
        self._policy = policy
        self._flight: Flight | None = flight
        self._result = result
        self._launched_ns = launched_ns

    def read(self) -> tuple[Landed, tuple[RowResult, ...]]:
        """Waits for the step; then one result per row.

        Raises:
            RuntimeError: It was read before, or what the device failed with.
        """
        if (flight := self._flight) is None:
            raise RuntimeError("a step is read once")
        self._flight = None
        landed, since_ns = self._policy.land(self, flight, self._launched_ns)
        result = self._result._replace(step_ns=monotonic_ns() - since_ns)
        return landed, (result,) * result.batch_size


class DevicePolicy(HeldPlans[DeviceDecodeSession]):
    """Launches steps. All plans of the same limits share what a device holds of steps.

    Args:
        kernels: What runs programs.
        vocab_size: Ids from here on are padding, and never drawn.
        max_step_tokens: Tokens that a step may hold.
        max_step_rows: Rows that a step may hold.
    """

    def __init__(
        self, *, kernels: DeviceKernels, vocab_size: int, max_step_tokens: int, max_step_rows: int
    ) -> None:
        super().__init__(kernels.name, max_step_tokens=max_step_tokens, max_step_rows=max_step_rows)
        self._vocab_size = vocab_size
        self._kernels = kernels
        self._shared: tuple[StepLimits, Staging, object] | None = None
        self._in_flight: list[DeviceStep] = []
        self._last_landed_ns = 0

    @property
    def device(self) -> Device:
        """Where steps run."""
        return self._kernels.device

    def build(self, model: LlamaModel, kv: KvStorage, key: PlanKey) -> DeviceDecodeSession:
        """Makes a plan of a key."""
        staging, workspace = self._shared_by(model, key)
        return DeviceDecodeSession(
            model,
            kv,
            key,
            device=self._kernels.device,
            launchers=self._kernels.launchers,
            staging=staging,
            sample_workspace=workspace,
            vocab_size=self._vocab_size,
        )

    def warm_up(self, model: LlamaModel, kv: KvStorage) -> None:
        """Builds the plan of each class, and captures it for every bucket; no step waits for either.

        Where a device captures nothing one bucket shows that the plan runs.
        """
        for token_class in TokenClass:
            plan, _ = self.held_plan(model, kv, self.key(model, kv, token_class))
            plan.warm(plan.buckets if self._kernels.device.captures else plan.buckets[:1])

    def launch_paged_step(
        self,
        rows: Sequence[Row],
        plan: DecodePlan,
        model: LlamaModel,
        kv: KvStorage,
        draws: Sequence[Draw | None],
        *,
        copied: Sequence[int] = (),
        wants_logprobs: bool = False,
    ) -> DeviceStep:
        """Starts one step.

        PLAN_ONCE replays what was captured of a held plan, capturing it at first use. REPLAN traces, lowers
        and launches for this step alone.

        Args:
            rows: Of one step and one token class, as `StepLimits.check` wants them. The last token of a row
                may be unknown where the device drew it in a step launched before.
            plan: Mode of all of them.
            model: The model.
            kv: The pool; written.
            draws: See `DeviceDecodeSession.launch`, as the next two.
            copied: Places of rows whose logits come to the host.
            wants_logprobs: Whether logprobs of drawn tokens come to the host.

        Raises:
            StepTooLarge: The step exceeds what plans are built for; nothing was built and nothing ran.
            ValueError: A row's values are wrong; likewise.
            RuntimeError: As many steps as may be are not read yet; likewise.
        """
        start_ns = monotonic_ns()
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise RuntimeError(f"{len(self._in_flight)} steps are launched and not read, no more may be")
        key = self.key(model, kv, rows[0].token_class if rows else TokenClass.DECODE)
        session, action = self._plan_for(rows, plan, model, kv, key)
        flight = session.launch(
            rows,
            key,
            draws,
            copied=copied,
            wants_logprobs=wants_logprobs,
            is_held=plan is DecodePlan.PLAN_ONCE,
        )
        launched_ns = monotonic_ns()
        self.reuses += action is PlanAction.REUSED
        self.replans += action is PlanAction.REPLANNED
        result = RowResult(
            plan_action=action,
            plan_ns=launched_ns - start_ns,
            step_ns=0,
            kernel_ns=0,
            launches=session.num_launches,
            host_bytes=flight.host_bytes,
            arena_bytes=session.program.arena_bytes,
            batch_size=len(rows),
        )
        step = DeviceStep(self, flight, result=result, launched_ns=launched_ns)
        self._in_flight.append(step)
        return step

    def land(self, step: DeviceStep, flight: Flight, launched_ns: int) -> tuple[Landed, int]:
        """Waits for a step; and tells since when the device had nothing else to do, in ns."""
        try:
            landed = flight.land()
        finally:
            self._in_flight.remove(step)
            since_ns, self._last_landed_ns = max(launched_ns, self._last_landed_ns), monotonic_ns()
        return landed, since_ns

    def _plan_for(
        self, rows: Sequence[Row], plan: DecodePlan, model: LlamaModel, kv: KvStorage, key: PlanKey
    ) -> tuple[DeviceDecodeSession, PlanAction]:
        if plan is DecodePlan.REPLAN or key not in self._held:
            self._shared_by(model, key)[0].check(rows)  # before anything is built
        if plan is DecodePlan.REPLAN:
            return self.build(model, kv, key), PlanAction.REPLANNED
        return self.held_plan(model, kv, key)

    def _shared_by(self, model: LlamaModel, key: PlanKey) -> tuple[Staging, object]:
        """What plans of the key's limits share: inputs, and what draws work in."""
        limits = key.limits(model.config.vocab_size)
        if self._shared is None or self._shared[0] != limits:
            kernels = self._kernels
            staging = Staging(limits, kernels.device)
            with kernels.device.in_order():
                workspace = kernels.launchers.sample_workspace(
                    num_rows=len(staging.ids),
                    num_entries=len(staging.entries),
                    vocab_size=self._vocab_size,
                )
            self._shared = limits, staging, workspace
        return self._shared[1:]
