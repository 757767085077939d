"""A session's token log and the one generation that may run on it. Free of torch and of time.

The log is the session. `num_computed` of its tokens have stored KV; a step lets that
number chase `num_tokens`, whatever the reason that it lags (idea 4 of the architecture).

A step may be launched before the one before it was read. A session is then *ahead*: `advance` counts
the row of the unread step as computed, and UNKNOWN_TOKEN stands at the end of the log for what it draws,
until `settle` tells the token. `retract` makes it as if the unread step had never held the session.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.batch import UNKNOWN_TOKEN, DecodePlan, PlanCounters, Row, TokenClass


@dataclass(slots=True)
class Generation:
    """One Generate or AppendInput call, as the scheduler sees it.

    Attributes:
        generation_id: Drawn by the gateway.
        input_ids: Tokens that the turn appends to the log; empty continues the log.
        priority: Turns of a higher one come first.
        appends_only: Nothing is drawn: the turn is done when all of the log has its KV.
        max_tokens: Tokens that it draws at most; None: up to the session's context.
        log_start: Length of the log before the turn; set when submitted, like the two that follow.
        first_drawn: Length of the log with the turn's input.
        arrival: Order among generations.
        is_started: Whether a step has held it.
        cached_tokens: Tokens of the earlier log whose KV was at hand at the first step.
        reprefilled_tokens: Tokens of the earlier log whose KV had been reclaimed by then.
        plan_counters: This generation's steps.
    """

    generation_id: str
    input_ids: tuple[int, ...]
    priority: int = 0
    appends_only: bool = False
    max_tokens: int | None = None
    log_start: int = 0
    first_drawn: int = 0
    arrival: int = 0
    is_started: bool = False
    cached_tokens: int = 0
    reprefilled_tokens: int = 0
    plan_counters: PlanCounters = field(default_factory=PlanCounters)

    @property
    def rank(self) -> tuple[int, int]:
        """Turns come in rising rank."""
        return -self.priority, self.arrival


@dataclass(slots=True)
class Session:
    """The persistent owner of a token log.

    Attributes:
        session_id: Drawn by the gateway.
        plan: How its steps get their plan; may change at any token.
        max_context_tokens: A log of this length is full.
        token_ids: The log: committed tokens, then the running turn's; the last may be UNKNOWN_TOKEN.
        class_borders: Positions, ascending, from which on tokens are of the other class than before. The
            log begins with PREFILL: input. Drawn tokens are DECODE.
        num_computed: Tokens at the head of the log whose KV is stored, or will be by the unread step. A
            drawn token is computed when something is to follow it, so that a turn ends with its last
            token's KV not stored.
        num_settled: `num_computed` as it was before the unread step; None where no step is unread.
        num_due: Tokens at the head of the log whose KV was stored when a turn was last committed; those
            of them that have none now have had it reclaimed.
        block_table: Physical block of each logical block of stored or scheduled KV. It is replaced whole, so
            that rows made while it stays share it, and who has seen one knows it by identity.
        revision: Advances once per committed turn.
        priority: Of its turns that choose none.
        generation: The running turn, if any.
        last_active: Order of the last turn's end; reclaiming starts at the lowest.
        plan_counters: Its steps but those of the running turn.
    """

    session_id: str
    plan: DecodePlan
    max_context_tokens: int
    token_ids: list[int] = field(default_factory=list)
    class_borders: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_settled: int | None = None
    num_due: int = 0
    block_table: tuple[int, ...] = ()
    revision: int = 0
    priority: int = 0
    generation: Generation | None = None
    last_active: int = 0
    plan_counters: PlanCounters = field(default_factory=PlanCounters)

    @property
    def num_tokens(self) -> int:
        """Tokens in the log, one that is not known yet included."""
        return len(self.token_ids)

    @property
    def has_unknown(self) -> bool:
        """Whether the log's last token is drawn by a step that is not read yet."""
        return self.num_settled is not None and self.token_ids[-1] == UNKNOWN_TOKEN

    @property
    def num_known(self) -> int:
        """Tokens of the log whose ids are known."""
        return len(self.token_ids) - self.has_unknown

    @property
    def num_stored(self) -> int:
        """Tokens at the head of the log whose KV a step has stored that was read."""
        settled = self.num_settled
        return self.num_computed if settled is None else min(self.num_computed, settled)

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
        """Tokens that the running turn has drawn, known or not; 0 without one."""
        turn = self.generation
        return 0 if turn is None else len(self.token_ids) - turn.first_drawn

    @property
    def all_counters(self) -> PlanCounters:
        """All its steps; nobody counts on in what this returns."""
        turn = self.generation
        return self.plan_counters if turn is None else self.plan_counters.followed_by(turn.plan_counters)

    @property
    def ends_when_read(self) -> bool:
        """Whether the running turn is over, whatever token it draws, once the unread step is read."""
        turn = self.generation
        if turn is None or self.num_settled is None:
            return False
        if turn.appends_only:
            return self.num_pending == 0
        is_last = self.num_generated == turn.max_tokens or len(self.token_ids) >= self.max_context_tokens
        return is_last and self.has_unknown

    def class_at(self, position: int) -> tuple[TokenClass, int]:
        """The class of the token at `position`, and where in the log its stretch of that class ends."""
        borders = self.class_borders
        number = bisect_right(borders, position)
        end = borders[number] if number < len(borders) else len(self.token_ids)
        return TokenClass.DECODE if number % 2 else TokenClass.PREFILL, end

    def append_input(self, token_ids: Sequence[int]) -> None:
        """Let tokens that were given join the log, as PREFILL."""
        if token_ids and len(self.class_borders) % 2 == 1:
            self.class_borders.append(len(self.token_ids))
        self.token_ids.extend(token_ids)

    def append_drawn(self, token_id: int) -> None:
        """Let a token that was drawn join the log, as DECODE."""
        if len(self.class_borders) % 2 == 0:
            self.class_borders.append(len(self.token_ids))
        self.token_ids.append(token_id)

    def cut_log(self, num_tokens: int) -> None:
        """Keep so many tokens of the log, and their classes."""
        del self.token_ids[num_tokens:]
        while self.class_borders and self.class_borders[-1] >= num_tokens:
            self.class_borders.pop()

    def row(self, position: int, count: int, token_class: TokenClass) -> Row:
        """A row of `count` tokens from `position` on, as log and blocks stand now."""
        turn, token_ids, end = self.generation, self.token_ids, position + count
        return Row(
            self.session_id,
            tuple(token_ids[position:end]),
            position,
            self.block_table,
            end == len(token_ids) and turn is not None and not turn.appends_only,
            self.plan,
            token_class,
        )

    def row_now(self, row: Row) -> Row | None:
        """A row that was scheduled, as it stands now that an earlier step was read, or was taken back.

        Tokens that became known are in.

        Returns:
            None where the tokens, the KV before them or the blocks were lost: the turn has to be scheduled
            again. That the turn which the row is of still runs is for the caller to know.
        """
        has_blocks = len(self.block_table) >= len(row.block_table)
        if not has_blocks or row.position > self.num_computed or row.context_len > len(self.token_ids):
            return None
        return self.row(row.position, len(row.token_ids), row.token_class)

    def advance(self, row: Row) -> None:
        """Count a row whose step was launched as computed; what it draws joins the log unknown."""
        self.num_settled = self.num_computed
        self.num_computed = row.context_len
        if row.wants_logits:
            self.append_drawn(UNKNOWN_TOKEN)

    def settle(self, token_id: int | None) -> None:
        """The unread step was read: its row's KV is stored, and `token_id` is what it drew, if anything."""
        if token_id is not None:
            self.token_ids[-1] = token_id
        self.num_settled = None

    def retract(self) -> None:
        """As if the unread step had not held this session; where no step is unread, nothing changes."""
        if self.num_settled is not None:
            self.num_computed = self.num_stored
            self.cut_log(self.num_known)
            self.num_settled = None

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

        A step that is not read yet is as if it had not held the turn.

        Raises:
            ValueError: No turn is running.
        """
        turn = self.generation
        if turn is None:
            raise ValueError(f"session {self.session_id} has no running turn")
        self.retract()
        if keep:
            self.revision += 1
            self.num_due = max(self.num_due, self.num_computed)
        else:
            self.cut_log(turn.log_start)
            # The turn may have computed the last token of the earlier log, which was not due: as before.
            self.num_computed = min(self.num_computed, max(turn.log_start - 1, self.num_due))
        self.plan_counters = self.all_counters
        self.generation = None
