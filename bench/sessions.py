"""Sessions that decode on a runner as the engine runs them: bind, run, draw, append.

Knows rows, draws and block tables; knows no scheduler, no text, and no other sessions than its own.
"""

import time
from collections.abc import Iterator, Sequence

from bench.loading import BLOCK_SIZE
from worker.batch import Batch, DecodePlan, Drawn, Row
from worker.params import Sampling
from worker.runner import Runner
from worker.sampling import Draw

GREEDY = Sampling(temperature=0.0)


class Sessions:
    """Sessions with prompts of one length, that draw greedily, all in each step.

    Args:
        runner: Its pool holds the blocks.
        prompts: Token ids per session, each at least one.
        tables: Per session, blocks for its prompt and all that is drawn.
        max_step_tokens: Prompts are computed in chunks of so many tokens, one session's at a time.

    Attributes:
        logs: Tokens per session, prompts included.
    """

    def __init__(
        self,
        runner: Runner,
        prompts: Sequence[Sequence[int]],
        tables: Sequence[tuple[int, ...]],
        *,
        max_step_tokens: int,
    ) -> None:
        self.logs = [list(prompt) for prompt in prompts]
        self._runner = runner
        self._num_prompt = [len(prompt) for prompt in prompts]
        self._computed = [0] * len(prompts)
        self._tables = tables
        self._max_step_tokens = max_step_tokens

    def forget(self) -> None:
        """As before the first `prefill`: nothing is computed, nothing was drawn."""
        self._computed = [0] * len(self.logs)
        self._keep(0)

    def rewind(self) -> None:
        """As behind the first `prefill`: prompts are computed, and one token was drawn for each."""
        self._computed = list(self._num_prompt)
        self._keep(1)

    def prefill(self) -> int:
        """Computes what is not computed yet and draws each session's next token; returns its time in ns."""
        start_ns = time.perf_counter_ns()
        for session, log in enumerate(self.logs):
            most = len(log)
            while self._computed[session] < most:
                self._step([session], self._max_step_tokens)
        return time.perf_counter_ns() - start_ns

    def decode(self, num_steps: int) -> list[int]:
        """Draws so many tokens for every session, all in each step; returns the steps' times in ns."""
        return list(self._decode(num_steps))

    def _decode(self, num_steps: int) -> Iterator[int]:
        everybody = range(len(self.logs))
        for _ in range(num_steps):
            start_ns = time.perf_counter_ns()
            self._step(everybody, 1)
            yield time.perf_counter_ns() - start_ns

    def _step(self, sessions: Sequence[int], most: int) -> None:
        batch = Batch(tuple(self._row(session, most) for session in sessions))
        draws = [
            Draw(GREEDY, self.logs[session], len(self.logs[session]) - self._num_prompt[session], frozenset())
            for session, row in zip(sessions, batch.rows, strict=True)
            if row.wants_logits
        ]
        drawn = iter(self._runner.launch(batch, draws).read().drawn)
        for session, row in zip(sessions, batch.rows, strict=True):
            self._computed[session] += len(row.token_ids)
            if row.wants_logits:
                self.logs[session].append(token_of(next(drawn), session))

    def _row(self, session: int, most: int) -> Row:
        log, start, table = self.logs[session], self._computed[session], self._tables[session]
        return next_row(session, log, start, most, table, DecodePlan.PLAN_ONCE)

    def _keep(self, num_drawn: int) -> None:
        for log, num_prompt in zip(self.logs, self._num_prompt, strict=True):
            del log[num_prompt + num_drawn :]


def next_row(
    session: int, log: Sequence[int], start: int, most: int, table: tuple[int, ...], plan: DecodePlan
) -> Row:
    """A session's share of its next step.

    Args:
        session: Its number.
        log: Its tokens.
        start: How many of them are computed.
        most: How many the step may take.
        table: Its blocks; the step is told as many as it needs, as the scheduler would.
        plan: Its mode.
    """
    token_ids = tuple(log[start : start + most])
    end = start + len(token_ids)
    blocks = table[: -(-end // BLOCK_SIZE)]
    return Row(str(session), token_ids, start, blocks, wants_logits=end == len(log), plan=plan)


def token_of(drawn: Drawn | None, session: int) -> int:
    """The token that was drawn. Raises ArithmeticError where none could be."""
    if drawn is None:
        raise ArithmeticError(f"session {session}: a logit is NaN or infinite, no token can be drawn")
    return drawn.token_id
