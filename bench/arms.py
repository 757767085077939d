"""One plan mode that decodes: the same prompts, the same steps, and what each of them took.

An arm has a runner and a pool of its own and does what the engine does around a step: launch the batch, which
binds, runs and draws, read what was drawn, append. Knows no other arm; who compares is `bench.plan`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.sessions import GREEDY, next_row, token_of
from worker.batch import Batch, DecodePlan, Row, RowResult
from worker.runner import Runner
from worker.sampling import Draw


@dataclass(frozen=True, slots=True)
class Step:
    """What one decode step of all sessions took: one token for each of them.

    Attributes:
        wall_ns: Time of `Runner.launch` and `read`, from call to return.
        sampling_ns: Part of it that drew the tokens.
        result: The runner's own figures.
    """

    wall_ns: int
    sampling_ns: int
    result: RowResult

    @property
    def inside_ns(self) -> int:
        """Time in kernels' bodies and in draws."""
        return self.result.kernel_ns + self.sampling_ns

    @property
    def outside_share(self) -> float:
        """Part of the runner's time that was neither in a kernel's body nor in a draw."""
        return 1.0 - self.inside_ns / self.wall_ns


class Arm:
    """Sessions that decode in one plan mode.

    Args:
        plan: Mode of every row.
        runner: Fresh, with a pool that holds all sessions to their end.
        prompts: Token ids per session, each at least one.
        block_tables: Per session, blocks for its prompt and all that is drawn.
        vocab_size: Logits of a row.
        max_step_tokens: Prompts are computed in chunks of so many tokens, one session's at a time.

    Attributes:
        plan: As given.
        runner: As given.
        steps: Decode steps so far.
        logs: Tokens per session, prompts included.
    """

    def __init__(
        self,
        plan: DecodePlan,
        runner: Runner,
        *,
        prompts: Sequence[Sequence[int]],
        block_tables: Sequence[tuple[int, ...]],
        vocab_size: int,
        max_step_tokens: int,
    ) -> None:
        self.plan = plan
        self.runner = runner
        self.steps: list[Step] = []
        self.logs = [list(prompt) for prompt in prompts]
        self._num_prompt = [len(prompt) for prompt in prompts]
        self._computed = [0] * len(prompts)
        self._tables = block_tables
        self._vocab_size = vocab_size
        self._max_step_tokens = max_step_tokens
        self._kept: npt.NDArray[np.float32] = np.empty((0, 0, 0), np.float32)

    def prefill(self) -> list[npt.NDArray[np.float32]]:
        """Computes the prompts and draws each session's first token; returns the logits, one [vocab] each."""
        found = []
        for session, log in enumerate(self.logs):
            num_tokens = len(log)
            while self._computed[session] < num_tokens:
                logits = self._step([session], self._max_step_tokens)[1]
                found += [np.array(row) for row in logits]
        return found

    def decode(self, num_steps: int) -> list[npt.NDArray[np.float32]]:
        """Draws `num_steps` tokens for every session, all sessions in each step.

        Returns:
            Copies of the logits, [sessions, vocab] float32 per step, good until the next call. Copying is not
            timed, and goes to memory that stays: fresh pages would be the next step's loss.
        """
        if len(self._kept) < num_steps:
            self._kept = np.full((num_steps, len(self.logs), self._vocab_size), np.nan, np.float32)
        for kept in self._kept[:num_steps]:
            step, logits = self._step(range(len(self.logs)), 1)
            self.steps.append(step)
            for place, row in enumerate(logits):
                kept[place] = row
        return list(self._kept[:num_steps])

    def _step(self, sessions: Sequence[int], most: int) -> tuple[Step, Sequence[npt.NDArray[np.float32]]]:
        batch = Batch(tuple(self._row(session, most) for session in sessions))
        draws = [
            Draw(GREEDY, self.logs[session], len(self.logs[session]) - self._num_prompt[session], frozenset())
            for session, row in zip(sessions, batch.rows, strict=True)
            if row.wants_logits
        ]
        start_ns = time.perf_counter_ns()
        found = self.runner.launch(batch, draws).read()
        end_ns = time.perf_counter_ns()
        of_row = iter(found.drawn)
        for session, row in zip(sessions, batch.rows, strict=True):
            self._computed[session] += len(row.token_ids)
            if row.wants_logits:
                self.logs[session].append(token_of(next(of_row), session))
        return Step(end_ns - start_ns, found.sample_ns, found.results[0]), found.logits

    def _row(self, session: int, most: int) -> Row:
        start, table = self._computed[session], self._tables[session]
        return next_row(session, self.logs[session], start, most, table, self.plan)
