"""PagedSessionScheduler: which tokens of which sessions the next step computes, and in which blocks.

Pure Python over ids and lengths: knows no tensors, no text, no time. The rule is one: a step lets each
running session's `num_computed` chase its `num_tokens`, under a budget of tokens and rows. Prefill, decode,
chunked prefill and recompute after a preemption are all that rule. (Continuous batching: Yu et al., Orca,
OSDI 2022; paged KV and preemption by recompute: Kwon et al., PagedAttention, SOSP 2023; chunked prefill
beside decode: Agrawal et al., Sarathi-Serve, OSDI 2024.)

Turns have one order, for rows, tokens and blocks alike: higher priority first, then arrival.
"""

from worker.batch import Batch, DecodePlan, Row, TokenClass
from worker.errors import OutOfBlocks, Refused
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
        has_token_classes: Whether kernels tell input from drawn tokens: no row holds both then, and a
            token is computed as what it is whenever it is computed. Otherwise all rows are DECODE.
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
        has_token_classes: bool = False,
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
        self.has_token_classes = has_token_classes
        self._sessions: dict[str, Session] = {}
        self._running: dict[str, Session] = {}
        self._order: list[tuple[Session, Generation]] | None = None
        self._clock = 0

    @property
    def has_work(self) -> bool:
        """Whether a generation is running."""
        return bool(self._running)

    def first_turn(self) -> Session | None:
        """The session whose turn comes first; None if no turn is running.

        If `schedule` returns no rows and no step is unread, nothing was left to reclaim for this one.
        """
        return next((session for session, _ in self._turns()), None)

    def is_appended(self, session: Session) -> bool:
        """Whether the running turn only appends and has nothing left to compute."""
        turn = session.generation
        return turn is not None and turn.appends_only and session.num_pending == 0

    def open(
        self,
        session_id: str,
        *,
        plan: DecodePlan | None = None,
        max_context_tokens: int | None = None,
        priority: int = 0,
    ) -> Session:
        """Open an empty session. Refused: SESSION_EXISTS."""
        if session_id in self._sessions:
            raise Refused("SESSION_EXISTS", "a session of this id is open", field="session_id")
        session = self._sessions[session_id] = Session(
            session_id=session_id,
            plan=plan or self.plan,
            max_context_tokens=min(max_context_tokens or self.max_context_tokens, self.max_context_tokens),
            priority=priority,
            last_active=self._tick(),
        )
        return session

    def close(self, session: Session) -> None:
        """Forget a session without a running turn and release its blocks."""
        if session.generation is not None:
            raise ValueError(f"session {session.session_id} has a running turn")
        self._cut(session, 0)
        del self._sessions[session.session_id]

    def submit(self, session: Session, generation: Generation) -> None:
        """Start a turn: its input joins the log as pending tokens.

        Refused, with nothing changed: SESSION_BUSY, FIELD_REQUIRED (no input on an empty log, or nothing
        to append), PROMPT_TOO_LONG (no room for one generated token after the input).
        """
        if session.generation is not None:
            raise Refused("SESSION_BUSY", "a generation is running on this session")
        if not generation.input_ids and not session.token_ids:
            raise Refused("FIELD_REQUIRED", "an empty session needs input", field="input")
        if not generation.input_ids and generation.appends_only:
            raise Refused("FIELD_REQUIRED", "there is nothing to append", field="input")
        length = session.num_tokens + len(generation.input_ids)
        if length >= session.max_context_tokens:
            raise Refused(
                "PROMPT_TOO_LONG",
                f"the log would hold {length} tokens before the first generated one; "
                f"the context holds {session.max_context_tokens}",
                field="input",
                metadata={"num_tokens": str(length), "max_context_tokens": str(session.max_context_tokens)},
            )
        generation.log_start, generation.first_drawn = session.num_tokens, length
        generation.arrival = self._tick()
        session.append_input(generation.input_ids)
        session.generation = generation
        self._running[session.session_id] = session
        self._order = None

    def prioritise(self, generation: Generation, priority: int) -> None:
        """Let a turn come among those of another priority from the next step on."""
        generation.priority = priority
        self._order = None

    def schedule(self) -> Batch:
        """Choose the rows of the next step and hold blocks for them.

        A turn may take the blocks of idle sessions and of turns that come after it, never of those before it,
        so the first can always go on and no turn waits for later ones. One token of the budget is kept for
        each later turn that has just one pending, so that a long input takes what streams leave; what a
        stream waits beside it is bounded by the time of `max_step_tokens`. A turn for which there are no
        blocks is left out, and so is one that ends with the unread step.
        """
        rows: list[Row] = []
        budget, rows_left, any_class = self.max_step_tokens, self.max_step_rows, TokenClass.DECODE
        turns = [turn for turn in self._turns() if turn[0].num_settled is None or not turn[0].ends_when_read]
        are_streams = [len(session.token_ids) - session.num_computed <= 1 for session, _ in turns]
        num_streams = sum(are_streams)
        for (session, generation), is_stream in zip(turns, are_streams, strict=True):
            if budget == 0 or rows_left == 0:
                break
            num_streams -= is_stream
            # Only now: an earlier row may have taken this session's blocks, and all is pending again.
            num_usable = self._num_usable(session)
            num_held = num_usable * self.block_size
            position = min(session.next_position, num_held)
            token_class, end = any_class, len(session.token_ids)
            if self.has_token_classes:
                token_class, end = session.class_at(position)
            count = end - position
            if count > 1:
                # No more than there are rows left for: what a step can't hold needs no tokens of its budget.
                count = min(count, max(budget - min(num_streams, rows_left - 1), 1))
            end = position + count
            if end > num_held and not self._hold(session, generation, num_usable, end):
                continue
            session.start_turn()
            rows.append(session.row(position, count, token_class))
            rows_left -= 1
            budget -= count
        return Batch(rows=tuple(rows))

    def advance(self, batch: Batch) -> None:
        """Go on from a step that was launched and is not read yet (see `Session`); at most one is unread."""
        for row in batch.rows:
            self._sessions[row.session_id].advance(row)

    def commit(self, row: Row, token_id: int | None) -> None:
        """Record a row of a step that was read: its KV is stored, a drawn token joins the log.

        Args:
            row: Of what `schedule` returned; `advance` may have been told of it.
            token_id: What was drawn after it. None for a row that wanted no logits, and for one that failed:
                that stays as it was before the step.

        Raises:
            ValueError: There is a token and the row wanted no logits; nothing is recorded.
        """
        session = self._sessions[row.session_id]
        if row.wants_logits and token_id is None:
            session.retract()
            return
        if token_id is not None and not row.wants_logits:
            raise ValueError(f"token_id {token_id} for a row of {row.session_id} that wants no logits")
        if session.num_settled is not None:
            session.settle(token_id)
        else:
            session.num_computed = row.context_len
            if token_id is not None:
                session.append_drawn(token_id)

    def finish(self, session: Session, *, keep: bool) -> None:
        """End the running turn: commit it as the next revision, or roll the log back to before it."""
        session.end_turn(keep=keep)
        self._cut(session, self._blocks_for(session.num_computed))
        self._idle(session)

    def fail(self, session: Session) -> tuple[int, ...]:
        """Roll the running turn back and give up all of the session's KV, whose numbers can't be trusted.

        Returns:
            Blocks that are free now; those that others hold too are not among them.
        """
        session.end_turn(keep=False)
        freed = self._cut(session, 0)
        self._idle(session)
        return freed

    def _idle(self, session: Session) -> None:
        session.last_active = self._tick()
        del self._running[session.session_id]
        self._order = None

    def _turns(self) -> list[tuple[Session, Generation]]:
        """Running turns in their order; not to be changed."""
        if self._order is None:  # since who runs, or a rank, changed
            turns = [(each, each.generation) for each in self._running.values() if each.generation]
            self._order = sorted(turns, key=lambda turn: turn[1].rank)
        return self._order

    def _num_usable(self, session: Session) -> int:
        """Blocks at the head of the table that the next row can build on.

        All of them, unless the first that it would write into is shared: other holders read what that one
        stores. It is given up, and its few tokens are computed again into a block of the session's own; to
        copy them would take a path from block to block that nothing else needs.
        """
        table = session.block_table
        first = session.next_position // self.block_size
        is_shared = first < len(table) and self.pool.num_holders(table[first]) > 1
        return first if is_shared else len(table)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _hold(self, session: Session, generation: Generation, num_usable: int, num_tokens: int) -> bool:
        """Let blocks that it alone holds follow its usable ones; False, and no change, where none is left."""
        missing = self._blocks_for(num_tokens) - num_usable
        if missing > self.pool.num_free and not self._reclaim(generation, missing - self.pool.num_free):
            return False
        try:
            blocks = self.pool.allocate(missing)
        except OutOfBlocks:
            return False
        self._cut(session, num_usable)
        session.block_table += tuple(blocks)
        return True

    def _reclaim(self, generation: Generation, wanted: int) -> bool:
        """Free so many blocks, or none at all if a turn's victims don't have them; False then.

        A block counts when all its holders are among the victims: releasing it frees nothing before.
        """
        holders_left: dict[int, int] = {}
        num_freed = 0
        chosen: list[Session] = []
        for victim in self._victims(generation):
            if num_freed >= wanted:
                break
            chosen.append(victim)
            for block in victim.block_table:
                holders_left[block] = holders_left.get(block, self.pool.num_holders(block)) - 1
                num_freed += holders_left[block] == 0
        if num_freed < wanted:
            return False
        for victim in chosen:
            if any(holders_left[block] == 0 for block in victim.block_table):
                self._cut(victim, 0)
        return True

    def _victims(self, generation: Generation) -> list[Session]:
        """Whose blocks a turn may take: the longest idle sessions first, then later turns, tail first."""
        idle = [other for other in self._sessions.values() if other.generation is None]
        idle.sort(key=lambda other: other.last_active)
        rank = generation.rank
        # Who ends with the unread step is idle by the next one.
        later = [each for each, turn in self._turns() if turn.rank > rank and not each.ends_when_read]
        return idle + later[::-1]

    def _cut(self, session: Session, num_blocks: int) -> tuple[int, ...]:
        """Keep so many blocks of a session's KV, and return those that are free now; the log stays."""
        surplus = session.block_table[num_blocks:]
        session.block_table = session.block_table[:num_blocks]
        session.num_computed = min(session.num_computed, num_blocks * self.block_size)
        return self.pool.release(surplus)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
