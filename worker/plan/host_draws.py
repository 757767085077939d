"""Runs and draws of a step by `worker.sampling`, from rows of logits in host memory."""

from collections.abc import Sequence
from time import monotonic_ns

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.batch import Drawn
from worker.plan.executor import DrawnRun, Executor
from worker.sampling import Draw, draw_tokens


class HostDraws:
    """Draws one row after the other, the way that all others are compared with.

    Args:
        rows: Where a run leaves its logits, [vocab] float32 each; only read.
        vocab_size: Ids from here on are padding, and never drawn.
    """

    def __init__(self, rows: Sequence[npt.NDArray[np.float32]], *, vocab_size: int) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._prepared: tuple[Sequence[int], Sequence[Draw]] = ((), ())

    def prepare(self, places: Sequence[int], draws: Sequence[Draw]) -> int:
        """See `TokenDraws`."""
        check_as_many(places, draws)
        self._prepared = places, draws
        return 0

    def draw(self) -> list[Drawn | None]:
        """Draws what was prepared from the rows as they are; as `DrawnRun` has them."""
        places, draws = self._prepared
        return draw_tokens([self._rows[place] for place in places], draws, vocab_size=self._vocab_size)


class RunAndHostDraws(HostDraws):
    """Runs a program and draws from its output.

    Args:
        executor: Its output is in host memory.
        vocab_size: Ids from here on are padding, and never drawn.
    """

    def __init__(self, executor: Executor, *, vocab_size: int) -> None:
        super().__init__(tuple(row.numpy() for row in executor.output), vocab_size=vocab_size)
        self._executor = executor

    def run_and_draw(self, num_tokens: int, num_rows: int, num_logits: int) -> DrawnRun:
        """See `TokenDraws`."""
        kernel_ns = self._executor.run(num_tokens, num_rows, num_logits)
        start_ns = monotonic_ns()
        drawn = self.draw()
        return kernel_ns, monotonic_ns() - start_ns, drawn


class OutputOnHost:
    """An executor whose output is copied to host memory after each run, which waits for the launches.

    Args:
        executor: Its output is in a device's memory.

    Attributes:
        output: As the executor's, in host memory.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.output: Tensor = torch.empty(executor.output.shape)

    def run(self, num_tokens: int, num_rows: int, num_logits: int) -> int:
        """See `Executor`."""
        kernel_ns = self._executor.run(num_tokens, num_rows, num_logits)
        self.output[:num_logits].copy_(self._executor.output[:num_logits])
        return kernel_ns

    def token_draws(self, *, vocab_size: int) -> RunAndHostDraws:
        """See `Executor`."""
        return RunAndHostDraws(self, vocab_size=vocab_size)


def check_as_many(places: Sequence[int], draws: Sequence[Draw]) -> None:
    """Raises ValueError unless there is a draw for each row of logits."""
    if len(draws) != len(places):
        raise ValueError(f"draws has {len(draws)}, the step has {len(places)} rows that want logits")
