"""PagedSessionScheduler: which tokens of which sessions the next step computes, and in which blocks.

Pure Python over ids and lengths: knows no tensors, no text, no time. The rule is one:
a step lets each running session's `num_computed` chase its `num_tokens`, under a budget
of tokens and rows. Prefill, decode, chunked prefill and recompute after a preemption are
all that rule. (Continuous batching: Yu et al., Orca, OSDI 2022; paged KV and preemption
by recompute: Kwon et al., PagedAttention, SOSP 2023; chunked prefill beside decode:
Agrawal et al., Sarathi-Serve, OSDI 2024.)
"""

from collections.abc import Sequence

from worker.batch import Batch, DecodePlan, Row
from worker.errors import Refused
from worker.kv.block_pool import BlockPool
from worker.session import Generation, Session


class PagedSessionScheduler:
    """Owns the sessions of a worker and the blocks that their KV lives in.

    Args:
        pool: Block ids to share out.
        block_size: Tokens per block.
        max_step_tokens: Tokens that one step computes at most.
        max_step_rows: Rows of one step at most; not over `max_step_tokens`.
        max_context_tokens: What the model can attend at most.
        plan: Mode of sessions that don't choose one.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_step_tokens: int,
        max_step_rows: int,
        max_context_tokens: int,
        plan: DecodePlan = DecodePlan.PLAN_ONCE,
    ) -> None:
        if not 1 <= max_step_rows <= max_step_tokens:
            raise ValueError(f"1 <= max_step_rows ({max_step_rows}) <= max_step_tokens ({max_step_tokens})")
        self.pool = pool
        self.block_size = block_size
        self.max_step_tokens = max_step_tokens
        self.max_step_rows = max_step_rows
        # A log never outgrows what the whole pool can hold, so the oldest turn can always finish.
        self.max_context_tokens = min(max_context_tokens, pool.num_blocks * block_size)
        self.plan = plan
        self._sessions: dict[str, Session] = {}
        self._running: dict[str, Session] = {}
        self._clock = 0

    @property
    def has_work(self) -> bool:
        """Whether a generation is running."""
        return bool(self._running)

    def open(
        self, session_id: str, *, plan: DecodePlan | None = None, max_context_tokens: int | None = None
    ) -> Session:
        """Open an empty session. Refused: SESSION_EXISTS."""
        if session_id in self._sessions:
            raise Refused("SESSION_EXISTS", "a session of this id is open", field="session_id")
        session = Session(
            session_id=session_id,
            plan=plan or self.plan,
            max_context_tokens=min(max_context_tokens or self.max_context_tokens, self.max_context_tokens),
            last_active=self._tick(),
        )
        self._sessions[session_id] = session
        return session

    def close(self, session: Session) -> None:
        """Forget a session without a running turn and free its blocks."""
        if session.generation is not None:
            raise ValueError(f"session {session.session_id} has a running turn")
        self._drop(session)
        del self._sessions[session.session_id]

    def submit(self, session: Session, generation: Generation) -> None:
        """Start a turn: its input joins the log as pending tokens.

        Refused, with nothing changed: SESSION_BUSY, FIELD_REQUIRED (no input on an empty log),
        PROMPT_TOO_LONG (no room for one generated token after the input).
        """
        if session.generation is not None:
            raise Refused("SESSION_BUSY", "a generation is running on this session")
        if not generation.input_ids and not session.token_ids:
            raise Refused("FIELD_REQUIRED", "an empty session needs input", field="input")
        length = session.num_tokens + len(generation.input_ids)
        if length >= session.max_context_tokens:
            raise Refused(
                "PROMPT_TOO_LONG",
                f"the log would hold {length} tokens before the first generated one; "
                f"the context holds {session.max_context_tokens}",
                field="input",
                metadata={"num_tokens": str(length), "max_context_tokens": str(session.max_context_tokens)},
            )
        generation.log_start = session.num_tokens
        generation.arrival = self._tick()
        session.token_ids.extend(generation.input_ids)
        session.generation = generation
        self._running[session.session_id] = session

    def schedule(self) -> Batch:
        """Choose the rows of the next step and hold blocks for them.

        Turns come in the order of arrival, for rows, tokens and blocks alike: a turn may take the
        blocks of later ones, never of earlier ones, so the first can always go on and no turn waits
        for ever. One token of the budget is kept for each later turn that has just one pending, so
        that a long input takes what streams leave; what a stream waits beside it is bounded by the
        time of `max_step_tokens`.
        """
        rows: list[Row] = []
        budget = self.max_step_tokens
        turns = self._turns()
        streams = {session.session_id for session, _ in turns if session.num_pending == 1}
        for session, generation in turns:
            if budget == 0 or len(rows) == self.max_step_rows:
                break
            streams.discard(session.session_id)
            # Only now: an earlier row may have taken this session's blocks, and all is pending again.
            count = min(session.num_pending, max(budget - len(streams), 1))
            if not self._hold(session, generation, session.num_computed + count):
                continue
            if not generation.is_started:
                self._start(session, generation)
            rows.append(self._row(session, count))
            budget -= count
        return Batch(rows=tuple(rows))

    def commit(self, batch: Batch, drawn: Sequence[int]) -> None:
        """Record a step that ran: KV of its rows is stored, drawn tokens join their logs.

        Args:
            batch: What `schedule` returned.
            drawn: One token id for each row that wanted logits, in row order.
        """
        ids = iter(drawn)
        for row in batch.rows:
            session = self._sessions[row.session_id]
            session.num_computed = row.context_len
            if row.wants_logits:
                session.token_ids.append(next(ids))

    def finish(self, session: Session, *, keep: bool) -> None:
        """End the running turn: commit it as the next revision, or roll the log back to before it."""
        generation = session.generation
        if generation is None:
            raise ValueError(f"session {session.session_id} has no running turn")
        if keep:
            session.revision += 1
        else:
            del session.token_ids[generation.log_start :]
            # As after any turn, the KV of the last token is not due yet.
            session.num_computed = min(session.num_computed, max(generation.log_start - 1, 0))
        surplus = len(session.block_table) - self._blocks_for(session.num_computed)
        if surplus > 0:
            self.pool.free(session.block_table[-surplus:])
            del session.block_table[-surplus:]
        session.generation = None
        session.last_active = self._tick()
        del self._running[session.session_id]

    def _turns(self) -> list[tuple[Session, Generation]]:
        """Running turns, the first to arrive first."""
        turns = [(session, session.generation) for session in self._running.values() if session.generation]
        return sorted(turns, key=lambda turn: turn[1].arrival)

    def _row(self, session: Session, count: int) -> Row:
        end = session.num_computed + count
        return Row(
            session_id=session.session_id,
            token_ids=tuple(session.token_ids[session.num_computed : end]),
            position=session.num_computed,
            block_table=tuple(session.block_table),
            wants_logits=end == session.num_tokens,
            plan=session.plan,
        )

    def _start(self, session: Session, generation: Generation) -> None:
        generation.is_started = True
        generation.cached_tokens = session.num_computed
        # All but the last token of the earlier log should have had KV.
        generation.reprefilled_tokens = max(generation.log_start - 1 - session.num_computed, 0)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _hold(self, session: Session, generation: Generation, num_tokens: int) -> bool:
        """Make the session's table cover `num_tokens`; False, with nothing taken, if that can't be."""
        missing = self._blocks_for(num_tokens) - len(session.block_table)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            victims = self._victims(generation)
            if missing > self.pool.num_free + sum(len(victim.block_table) for victim in victims):
                return False
            for victim in victims:
                if self.pool.num_free >= missing:
                    break
                self._drop(victim)
        session.block_table.extend(self.pool.allocate(missing))
        return True

    def _victims(self, generation: Generation) -> list[Session]:
        """Whose blocks a turn may take: the longest idle sessions first, then later turns, tail first."""
        idle = [other for other in self._sessions.values() if other.generation is None and other.block_table]
        idle.sort(key=lambda other: other.last_active)
        later = [other for other, turn in self._turns() if turn.arrival > generation.arrival]
        return idle + [other for other in reversed(later) if other.block_table]

    def _drop(self, session: Session) -> None:
        """Free a session's KV; its log stays and is computed again when needed."""
        self.pool.free(session.block_table)
        session.block_table.clear()
        session.num_computed = 0

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
