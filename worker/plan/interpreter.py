"""Runs a program launch by launch in Python, over the same arena as the native executor: the oracle of plans.

Slow on purpose: every launch calls a functional implementation and its results are copied into the arena, so
that equal logits also prove the arena's layout.
"""

from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from worker.kernels.ops import Implementation, implementations
from worker.kv.storage import KvStorage
from worker.model.config import LlamaConfig
from worker.model.weights.store import WeightStore
from worker.plan.graph import StepInputs
from worker.plan.host_draws import RunAndHostDraws
from worker.plan.program import Constant, Extent, Input, KvLayer, Operand, Program, Value, live_length


class Interpreter:
    """A program over functional implementations.

    Args:
        program: What to run.
        implementations: By short operator name, e.g. `linear`.
        inputs: Buffers at the program's capacity, on the pool's device.
        store: Weights.
        kv: Pool; written.

    Attributes:
        arena: [floats] float32, all results.
        output: [most logits, vocab] float32, a view of the arena.

    Raises:
        ValueError: The program calls an operator that has no implementation.
    """

    def __init__(
        self,
        program: Program,
        implementations: Mapping[str, Implementation],
        inputs: StepInputs,
        store: WeightStore,
        kv: KvStorage,
    ) -> None:
        self._program = program
        self._inputs = inputs
        self._store = store
        self._kv = kv
        self.arena = torch.zeros(program.arena_bytes // 4, device=kv.data.device)
        self.output = self._rows(program.output, program.capacity.num_rows)
        self._calls = []
        for launch in program.launches:
            if launch.operator not in implementations:
                raise ValueError(f"the program calls {launch.operator}, which has no implementation")
            self._calls.append((launch, implementations[launch.operator]))

    @torch.inference_mode()
    def run(self, num_tokens: int, num_rows: int, num_logits: int) -> int:
        """Runs every launch once over the live part of the inputs.

        Args:
            num_tokens: Live tokens.
            num_rows: Live rows; those without tokens are skipped.
            num_logits: Tokens that logits are wanted for.

        Returns:
            Time inside implementations in ns; 0 on a device that runs behind the host.
        """
        live = {Extent.TOKENS: num_tokens, Extent.ROWS: num_rows, Extent.LOGITS: num_logits}
        kernel_ns = 0
        for launch, implementation in self._calls:
            arguments = [self._operand(operand, live) for operand in launch.arguments]
            start_ns = perf_counter_ns()
            results = implementation(*arguments)
            kernel_ns += perf_counter_ns() - start_ns
            if isinstance(results, Tensor):
                results = (results,)
            for output, result in zip(launch.outputs, results or (), strict=True):
                self._rows(output, live[output.extent]).copy_(result)
        return kernel_ns if self.arena.device.type == "cpu" else 0

    def _operand(self, operand: Operand, live: Mapping[Extent, int]) -> Any:
        match operand:
            case Value():
                return self._rows(operand, live[operand.extent])
            case Input(name):
                tensor: Tensor = getattr(self._inputs, name)
                return tensor[: live_length(name, live)]
            case Constant(parts):
                return self._store.stacked(parts)
            case KvLayer(layer, is_key):
                return (self._kv.keys if is_key else self._kv.values)[layer]
            case _:
                return operand

    def token_draws(self, *, vocab_size: int) -> RunAndHostDraws:
        """Draws as `worker.sampling` does."""
        return RunAndHostDraws(self, vocab_size=vocab_size)

    def _rows(self, value: Value, count: int) -> Tensor:
        return self.arena.as_strided((count, value.width), (value.row_stride, 1), value.offset)


class InterpreterKernels:
    """The functional implementations that `worker.kernels.ops` lists under a name.

    Attributes:
        name: As given.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.implementations = implementations(name)

    def check(self, config: LlamaConfig, kv: KvStorage) -> None:
        """Functional implementations take any sizes."""

    def executor(
        self, program: Program, inputs: StepInputs, store: WeightStore, kv: KvStorage
    ) -> Interpreter:
        """Binds a program to memory."""
        return Interpreter(program, self.implementations, inputs, store, kv)
