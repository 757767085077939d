"""A session's token log and the one generation that may run on it. Free of torch and of time.

The log is the session. `num_computed` of its tokens have stored KV; a step lets that
number chase `num_tokens`, whatever the reason that it lags (idea 4 of the architecture).
"""

from dataclasses import dataclass, field

from worker.batch import DecodePlan, PlanCounters


@dataclass(slots=True)
class Generation:
    """One Generate or AppendInput call, as the scheduler sees it.

    Attributes:
        generation_id: Drawn by the gateway.
        input_ids: Tokens that the turn appends to the log; empty continues the log.
        priority: Turns of a higher one come first.
        appends_only: Nothing is drawn: the turn is done when all of the log has its KV.
        log_start: Length of the log before the turn; set when submitted.
        arrival: Order among generations; set when submitted.
        is_started: Whether a step has held it.
        cached_tokens: Tokens of the earlier log whose KV was at hand at the first step.
        reprefilled_tokens: Tokens of the earlier log whose KV had been reclaimed by then.
        plan_counters: This generation's steps.
    """

    generation_id: str
    input_ids: tuple[int, ...]
    priority: int = 0
    appends_only: bool = False
    log_start: int = 0
    arrival: int = 0
    is_started: bool = False
    cached_tokens: int = 0
    reprefilled_tokens: int = 0
    plan_counters: PlanCounters = field(default_factory=PlanCounters)


@dataclass(slots=True)
class Session:
    """The persistent owner of a token log.

    Attributes:
        session_id: Drawn by the gateway.
        plan: How its steps get their plan; may change at any token.
        max_context_tokens: A log of this length is full.
        token_ids: The log: committed tokens, then the running turn's.
        num_computed: Tokens at the head of the log whose KV is stored. A drawn token is computed when
            something is to follow it, so that a turn ends with its last token's KV not stored.
        num_due: Tokens at the head of the log whose KV was stored when a turn was last committed; those
            of them that have none now have had it reclaimed.
        block_table: Physical block of each logical block of stored or scheduled KV.
        revision: Advances once per committed turn.
        priority: Of its turns that choose none.
        generation: The running turn, if any.
        last_active: Order of the last turn's end; reclaiming starts at the lowest.
        plan_counters: All its steps.
    """

    session_id: str
    plan: DecodePlan
    max_context_tokens: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_due: int = 0
    block_table: list[int] = field(default_factory=list)
    revision: int = 0
    priority: int = 0
    generation: Generation | None = None
    last_active: int = 0
    plan_counters: PlanCounters = field(default_factory=PlanCounters)

    @property
    def num_tokens(self) -> int:
        """Tokens in the log."""
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to compute."""
        return len(self.token_ids) - self.num_computed

    @property
    def next_position(self) -> int:
        """Where the next row starts: at the first token without KV, else at the last token.

        Logits come with a computed token, so where all of the log has KV (as after an append), its last
        token is computed once more.
        """
        return min(self.num_computed, len(self.token_ids) - 1)

    @property
    def num_generated(self) -> int:
        """Tokens that the running turn has drawn; 0 without one."""
        turn = self.generation
        return 0 if turn is None else len(self.token_ids) - turn.log_start - len(turn.input_ids)

    def start_turn(self) -> None:
        """Note, at the running turn's first step, how much of the earlier log has KV; later: nothing."""
        turn = self.generation
        if turn is None or turn.is_started:
            return
        turn.is_started = True
        turn.cached_tokens = self.next_position
        # The last token of the log is computed in any case: it does not count as reclaimed.
        turn.reprefilled_tokens = max(min(self.num_due, self.num_tokens - 1) - self.next_position, 0)

    def end_turn(self, *, keep: bool) -> None:
        """Commit the running turn as the next revision, or roll the log back to before it.

        Raises:
            ValueError: No turn is running.
        """
        turn = self.generation
        if turn is None:
            raise ValueError(f"session {self.session_id} has no running turn")
        if keep:
            self.revision += 1
            self.num_due = max(self.num_due, self.num_computed)
        else:
            del self.token_ids[turn.log_start :]
            # The turn may have computed the last token of the earlier log, which was not due: as before.
            self.num_computed = min(self.num_computed, max(turn.log_start - 1, self.num_due))
        self.generation = None
