"""A held plan on a device: a launch list for each bucket, captured at first use. Knows no policy."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from worker.batch import Row
from worker.kernels.draw_words import DRAW_WORDS
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.plan.buckets import Bucket, bucket_for, buckets_of
from worker.plan.decode_session import PlanKey, StalePlan
from worker.plan.device import Device, Launches
from worker.plan.device_executor import DeviceExecutor
from worker.plan.flight import Flight
from worker.plan.graph import trace
from worker.plan.launchers import Launchers
from worker.plan.lower import lower
from worker.plan.passes import optimise
from worker.plan.program import Capacity, Constant, Program
from worker.plan.staging import Staged, Staging
from worker.sampling import Draw

_NARROW = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_OWN_LAUNCHES = 2
"""Beside those of the program: `bind_step` before, `logits_sample` after."""


class DeviceDecodeSession:
    """The step of one token class traced, optimised, lowered and bound to a device's memory.

    A step is one copy to the device, one replay and one copy back: nothing but ids, unless more is asked for.
    What is replayed has the size of a bucket; rows and tokens beyond the live ones are padding.

    Args:
        model: Traced; its weights are bound.
        kv: Bound; it mutates in place.
        key: What this plan is for, of the same model and pool.
        device: Where the pool is.
        launchers: Kernels; `key.kernels` is their name.
        staging: Inputs, shared by all plans of these limits.
        sample_workspace: What draws are given to work in, shared likewise.
        vocab_size: Ids from here on are padding, and never drawn.

    Attributes:
        key: As given.
        program: What a replay runs between `bind_step` and `logits_sample`.
        num_launches: Of a step.
        realize_count: Steps so far.

    Raises:
        StalePlan: `key` is of another model, pool or kernels.
        KernelsUnsuitable: There is no kernel for an operator.
    """

    def __init__(
        self,
        model: LlamaModel,
        kv: KvStorage,
        key: PlanKey,
        *,
        device: Device,
        launchers: Launchers,
        staging: Staging,
        sample_workspace: object,
        vocab_size: int,
    ) -> None:
        actual = PlanKey.of(
            model,
            kv,
            kernels=launchers.name,
            max_step_tokens=key.max_step_tokens,
            max_step_rows=key.max_step_rows,
            token_class=key.token_class,
        )
        if reasons := key.differences(actual):
            raise StalePlan(reasons)
        self.key = key
        self.realize_count = 0
        self._device = device
        self._launchers = launchers
        self._staging = staging
        self._sample_workspace = sample_workspace
        self._vocab_size = vocab_size
        self.buckets = buckets_of(max_step_tokens=key.max_step_tokens, max_step_rows=key.max_step_rows)
        with device.in_order():
            capacity = key.limits(model.config.vocab_size).capacity
            self.program = _device_program(model, kv, capacity, key, launchers)
            self._executor = DeviceExecutor(
                self.program,
                launchers,
                model.store,
                kv,
                token_class=key.token_class,
                max_context_tokens=model.config.max_context_tokens,
                workspace=self._workspace(model, kv),
            )
            # Weights that were stacked just now have let go of their parts, which this order may still read.
            device.mark().wait()
        self.num_launches = len(self.program.launches) + _OWN_LAUNCHES
        self._lists: dict[Bucket, Launches] = {}
        self._replays: dict[Bucket, Launches] = {}

    def is_valid_for(self, key: PlanKey) -> bool:
        """Whether this plan may run steps of `key`."""
        return self.key is key or self.key == key

    def launch(
        self,
        rows: Sequence[Row],
        key: PlanKey,
        draws: Sequence[Draw | None],
        *,
        copied: Sequence[int] = (),
        wants_logprobs: bool = False,
        is_held: bool,
    ) -> Flight:
        """Starts one step and does not wait for it.

        A refused one changes nothing, and one that fails here harms no later one.

        Args:
            rows: Of one step, all of the plan's token class.
            key: What the step belongs to.
            draws: One for each row that wants logits: how its token is drawn on the device, None: not there.
            copied: Places among these of the rows whose logits come to the host, ascending.
            wants_logprobs: Whether the logprobs of drawn tokens come, too.
            is_held: Whether launches of the bucket are captured, and replayed from then on.

        Raises:
            StalePlan: The plan was built for another key.
            StepTooLarge: The step exceeds a limit of the key.
            ValueError: A row's values are wrong.
        """
        if not self.is_valid_for(key):
            raise StalePlan(self.key.differences(key))
        self._staging.check(rows)
        bucket = bucket_for(self.buckets, sum(len(row.token_ids) for row in rows))
        with self._device.in_order():
            staged = self._staging.stage(rows, draws, bucket)
            try:
                self._run(bucket, is_held=is_held)
                flight = self._fetch(bucket, staged, copied, wants_logprobs=wants_logprobs)
            except BaseException:
                self._staging.forget(rows)
                raise
        self.realize_count += 1
        return flight

    def warm(self, buckets: Sequence[Bucket]) -> None:
        """Runs the launches of buckets once over padding alone, which writes no KV, and captures them."""
        for bucket in buckets:
            with self._device.in_order():
                self._staging.stage((), (), bucket)
                self._run(bucket, is_held=True)
                self._device.mark().wait()

    def _run(self, bucket: Bucket, *, is_held: bool) -> None:
        if (replay := self._replays.get(bucket)) is not None and is_held:
            self._device.run(replay)
            return
        launches = self._launches(bucket)
        self._device.run(launches)
        if is_held:
            # Only now: what runs for the first time may compile and allocate.
            self._replays[bucket] = self._device.capture(launches)

    def _launches(self, bucket: Bucket) -> Launches:
        if bucket not in self._lists:
            staging = self._staging
            layout, inputs = staging.layout(bucket), staging.inputs_of(bucket)
            self._lists[bucket] = partial(
                _call_all,
                (
                    partial(
                        self._launchers.bind_step,
                        staging.words,
                        layout,
                        inputs,
                        staging.block_table,
                        staging.fed,
                        num_tokens=bucket.num_tokens,
                        num_rows=bucket.num_rows,
                        num_logits=bucket.num_rows,
                        block_size=self.key.block_size,
                    ),
                    *self._executor.launches(bucket, inputs),
                    self._sampler(bucket),
                ),
            )
        return self._lists[bucket]

    def _sampler(self, bucket: Bucket) -> Callable[[], Any]:
        staging, layout = self._staging, self._staging.layout(bucket)
        rows = bucket.num_rows
        words = staging.words[layout.draws : layout.draws + rows * DRAW_WORDS]
        return partial(
            self._launchers.logits_sample,
            self._executor.output(bucket),
            words.view(rows, DRAW_WORDS),
            staging.entries,
            staging.fed,
            vocab_size=self._vocab_size,
            workspace=self._sample_workspace,
            out=(staging.ids[:rows], staging.logprobs[:rows]),
        )

    def _fetch(
        self, bucket: Bucket, staged: Staged, copied: Sequence[int], *, wants_logprobs: bool
    ) -> Flight:
        """Copies what the step leaves to host memory of its own."""
        device, staging = self._device, self._staging
        num_logits, num_bytes = staged

        def fetch(source: Tensor) -> Tensor:
            nonlocal num_bytes
            target = device.host(*source.shape, dtype=source.dtype)
            device.copy(target, source)
            num_bytes += source.nbytes
            return target

        ids = fetch(staging.ids[:num_logits])
        logprobs = fetch(staging.logprobs[:num_logits]) if wants_logprobs else None
        output = self._executor.output(bucket)
        logits = {place: fetch(output[place]) for place in copied}
        return Flight(
            ids=ids,
            logprobs=logprobs,
            logits=logits,
            done=device.mark(),
            kept=self,
            host_bytes=num_bytes,
        )

    def _workspace(self, model: LlamaModel, kv: KvStorage) -> Tensor:
        """As much as attention needs for any bucket.

        Spans of attention, and so bits, follow the model's longest context, not what the pool has room for:
        workers with pools of other sizes agree.
        """
        floats = max(
            self._launchers.workspace_floats(
                model.config,
                kv,
                self.key.token_class,
                num_tokens=bucket.num_tokens,
                num_rows=bucket.num_rows,
                max_context_tokens=model.config.max_context_tokens,
            )
            for bucket in self.buckets
        )
        return torch.empty(floats, device=kv.data.device)


def _call_all(launches: Sequence[Callable[[], Any]]) -> None:
    for launch in launches:
        launch()


def _device_program(
    model: LlamaModel, kv: KvStorage, capacity: Capacity, key: PlanKey, launchers: Launchers
) -> Program:
    """The step with values in the forms that the kernels compute in anyway."""
    step = optimise(trace(model, kv))
    matrix = model.store.matrix
    weights = [matrix(parts) for parts in _product_parts(lower(step, capacity))]
    dtypes = {launchers.product_dtype(weight) for weight in weights}
    return lower(
        step,
        capacity,
        narrow=_NARROW.get(dtypes.pop(), "float32") if len(dtypes) == 1 else "float32",
        q_narrow=_NARROW.get(launchers.attention_dtype(kv.data.dtype), "float32"),
        planes=lambda parts: launchers.splits(matrix(parts), key.token_class),
    )


def _product_parts(program: Program) -> set[tuple[str, ...]]:
    """Names of the weights that the program multiplies with."""
    return {
        argument.parts
        for launch in program.launches
        if launch.operator in ("linear", "linear_swiglu")
        for argument in launch.arguments
        if isinstance(argument, Constant)
    }
