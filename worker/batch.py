"""Values that the worker's rooms exchange. Knows no torch and no protobuf.

What each row of a step has is a named tuple: it costs a third of a frozen dataclass to make.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple


class DecodePlan(Enum):
    """How a row's step gets its plan; `PagedDecodePlan` of the public API without UNSPECIFIED."""

    PLAN_ONCE = "plan_once"
    REPLAN = "replan"


class PlanAction(Enum):
    """How a row's step got its plan."""

    BUILT = "built"
    REUSED = "reused"
    REPLANNED = "replanned"


class TokenClass(Enum):
    """Which kernels compute a token, for life: those of a row's generated tokens, or those of its input.

    On devices whose matrix units want other instructions for many tokens than for one; elsewhere all tokens
    are DECODE.
    """

    DECODE = "decode"
    PREFILL = "prefill"


UNKNOWN_TOKEN = -1
"""Stands in a log, and in a row, for the token that a step which is not read yet has drawn."""


class Row(NamedTuple):
    """One session's share of a step: `token_ids` to compute from `position` on.

    Attributes:
        session_id: Owner of the row.
        token_ids: Pending tokens of this step, at least one.
        position: Position in the log of `token_ids[0]`; the tokens before it have stored KV.
        block_table: Physical block of each logical block; covers `position + len(token_ids)` tokens.
        wants_logits: Whether the row's last token ends the log, so that a token is drawn after it.
        plan: How this row's step gets its plan.
        token_class: Of all tokens of the row.
    """

    session_id: str
    token_ids: tuple[int, ...]
    position: int
    block_table: tuple[int, ...]
    wants_logits: bool
    plan: DecodePlan
    token_class: TokenClass = TokenClass.DECODE

    @property
    def context_len(self) -> int:
        """Tokens that the row's last token attends, itself included."""
        return self.position + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """All rows of one step, in the order in which they were scheduled."""

    rows: tuple[Row, ...]

    def turns(self) -> tuple["Batch", ...]:
        """The batch cut by plan mode and token class, PLAN_ONCE first, and of each mode DECODE first.

        What each mode's rows wait for is their own plan; of each class other kernels run.
        """
        rows = self.rows
        if not rows:
            return ()
        plan, token_class = rows[0].plan, rows[0].token_class
        if all(row.plan is plan and row.token_class is token_class for row in rows):
            return (self,)
        cut = (
            tuple(row for row in rows if row.plan is plan and row.token_class is token_class)
            for plan in DecodePlan
            for token_class in TokenClass
        )
        return tuple(Batch(turn) for turn in cut if turn)


class RowResult(NamedTuple):
    """What the runner tells of one row beside its logits.

    Attributes:
        plan_action: How the row's step got its plan.
        plan_ns: Time to get the plan (trace, optimise, lower) and to bind, shared by the rows of one
            program run.
        step_ns: Time of that program run.
        kernel_ns: Of `step_ns`, the time inside kernels, each as its longest thread took it; 0: not measured.
        launches: Kernel launches of that program run.
        host_bytes: Bytes that program run moved between host and program: inputs that were written, and
            one id per row that a token is drawn for.
        arena_bytes: Size of the program's arena.
        batch_size: Rows of that program run.
    """

    plan_action: PlanAction
    plan_ns: int
    step_ns: int
    kernel_ns: int
    launches: int
    host_bytes: int
    arena_bytes: int
    batch_size: int


@dataclass(slots=True)
class PlanCounters:
    """How the steps of a turn or a session got their plan, what that took, and what the last one cost."""

    builds: int = 0
    reuses: int = 0
    replans: int = 0
    plan_ns: int = 0
    step_ns: int = 0
    launches_per_step: int = 0
    host_bytes_per_step: int = 0
    arena_bytes: int = 0

    def count(self, result: RowResult) -> None:
        """Add one step."""
        action = result.plan_action
        if action is PlanAction.REUSED:  # nearly always
            self.reuses += 1
        else:
            self.builds += action is PlanAction.BUILT
            self.replans += action is PlanAction.REPLANNED
        self.plan_ns += result.plan_ns
        self.step_ns += result.step_ns
        self.launches_per_step = result.launches
        self.host_bytes_per_step = result.host_bytes
        self.arena_bytes = result.arena_bytes

    def followed_by(self, later: "PlanCounters") -> "PlanCounters":
        """The steps of both, of which the last one is `later`'s where that has any; a value of its own."""
        return replace(
            later if later.builds or later.reuses or later.replans else self,
            builds=self.builds + later.builds,
            reuses=self.reuses + later.reuses,
            replans=self.replans + later.replans,
            plan_ns=self.plan_ns + later.plan_ns,
            step_ns=self.step_ns + later.step_ns,
        )


class FinishReason(Enum):
    """Why a turn ended, of the ends that are no failure."""

    EOS = "eos"
    STOP_SEQUENCE = "stop_sequence"
    STOP_TOKEN = "stop_token"  # noqa: S105  a reason, no secret
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    APPENDED = "appended"  # nothing was to be drawn, and all of the input has its KV


class Logprob(NamedTuple):
    """A token and the natural logarithm of its probability by the raw logits."""

    token_id: int
    logprob: float


class Drawn(NamedTuple):
    """One row's draw.

    Attributes:
        token_id: The token.
        logprob: Of the raw logits; None unless asked for.
        top: The most likely tokens, the first the likeliest; as many as asked for.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()


class UsageCounts(NamedTuple):
    """Tokens of one turn: its input, of the earlier log at hand or computed again, and generated."""

    input_tokens: int
    cached_tokens: int
    reprefilled_tokens: int
    output_tokens: int


class Started(NamedTuple):
    """A turn entered its first step."""

    generation_id: str
    usage: UsageCounts
    queue_ns: int
    was_dropped: bool


class TokenDrawn(NamedTuple):
    """A turn's next token.

    Attributes:
        generation_id: The turn.
        session_id: Its session.
        number: Among the turn's tokens, from 0.
        drawn: The token and its logprobs.
        text: Text that became certain with it.
        usage: Counts, this token included.
        plan: Mode of the row.
        result: What the runner told of the row.
        since_start_ns: From submit.
        itl_ns: From the token before; 0 for the first.
        queue_ns: From submit to the turn's first step.
        sample_ns: Time to draw this step's tokens.
        context_len: Tokens that the step attended.
    """

    generation_id: str
    session_id: str
    number: int
    drawn: Drawn
    text: str
    usage: UsageCounts
    plan: DecodePlan
    result: RowResult
    since_start_ns: int
    itl_ns: int
    queue_ns: int
    sample_ns: int
    context_len: int


class Finished(NamedTuple):
    """A turn ended without a failure.

    Attributes:
        generation_id: The turn.
        reason: Why.
        stopped_by: The stop sequence or the stop token's id that ended it; None where neither did.
        text: What was still held back.
        usage: Final counts.
        queue_ns: Submit to the first step.
        ttft_ns: Submit to the first token; 0 if there was none.
        e2e_ns: Submit to the end.
        revision: The session's, after the turn.
        num_tokens: Length of its log, after the turn.
        plan_counters: This turn's steps.
        is_late: Whether the caller's deadline ended it, whose policy keeps what there is.
    """

    generation_id: str
    reason: FinishReason
    stopped_by: str | int | None
    text: str
    usage: UsageCounts
    queue_ns: int
    ttft_ns: int
    e2e_ns: int
    revision: int
    num_tokens: int
    plan_counters: PlanCounters
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A turn failed, and was rolled back.

    Attributes:
        generation_id: The turn.
        reason: UPPER_SNAKE reason of the public API.
        message: One sentence for the caller.
        metadata: Numbers and ids that belong to it.
    """

    generation_id: str
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)


Event = Started | TokenDrawn | Finished | Failed


class StepReport(NamedTuple):
    """What one step, or one command between steps, has to tell."""

    events: tuple[Event, ...]
