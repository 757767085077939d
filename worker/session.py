"""A session's token log and the one generation that may run on it. Free of torch and of time.

The log is the session. `num_computed` of its tokens have stored KV; a step lets that
number chase `num_tokens`, whatever the reason that it lags (idea 4 of the architecture).
"""

from dataclasses import dataclass, field

from worker.batch import DecodePlan, PlanCounters


@dataclass(frozen=True, slots=True)
class Sampling:
    """Effective sampling of one generation.

    Attributes:
        temperature: 0 is greedy.
        seed: Draws come from (seed, position in the log).
    """

    temperature: float
    seed: int


@dataclass(slots=True)
class Generation:
    """One Generate call.

    Attributes:
        generation_id: Drawn by the gateway.
        input_ids: Tokens that the turn appends to the log; empty continues the log.
        sampling: Effective sampling.
        max_tokens: Tokens to generate at most; None: up to the session's context.
        eos_ids: Ids that end the turn.
        keeps_partial: Whether a cancel commits what there is, or rolls the turn back.
        log_start: Length of the log before the turn; set when submitted.
        arrival: Order among generations; set when submitted.
        cached_tokens: Tokens of the earlier log whose KV was at hand at the first step.
        reprefilled_tokens: Tokens of the earlier log whose KV had been reclaimed by then.
        plan_counters: This generation's steps.
    """

    generation_id: str
    input_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None
    eos_ids: frozenset[int]
    keeps_partial: bool = False
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
        num_computed: Tokens at the head of the log whose KV is stored; never the last one between two
            turns, since a token is computed when something is to follow it.
        block_table: Physical block of each logical block of stored or scheduled KV.
        revision: Advances once per committed turn.
        generation: The running turn, if any.
        last_active: Order of the last turn's end; reclaiming starts at the lowest.
        plan_counters: All its steps.
    """

    session_id: str
    plan: DecodePlan
    max_context_tokens: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    revision: int = 0
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
    def num_generated(self) -> int:
        """Tokens that the running turn has drawn; 0 without one."""
        turn = self.generation
        return 0 if turn is None else len(self.token_ids) - turn.log_start - len(turn.input_ids)
