"""Typed commands for the engine thread, the only way into it, and what they are answered with.

Values; nothing here acts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from worker.batch import DecodePlan, PlanCounters
from worker.model.chat import Conversation
from worker.session import Sampling


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a session's turns fall back to; None where the session does not say."""

    temperature: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TurnBase:
    """What the next turn of a session builds on. Published whole by the engine, read without a lock.

    Attributes:
        revision: Committed turns so far; a turn built on another revision is refused as stale.
        num_tokens: Length of the log; 0 where the turn's input opens it.
        max_context_tokens: Length at which the log is full.
        conversation: What a chat turn extends.
        defaults: Sampling that the request's fields override.
    """

    revision: int
    num_tokens: int
    max_context_tokens: int
    conversation: Conversation
    defaults: SamplingDefaults


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as it stood between two steps.

    Attributes:
        session_id: Its id.
        plan: Effective mode.
        revision: Committed turns.
        num_tokens: Length of the log, a running turn included.
        num_computed: Tokens whose KV is stored.
        max_context_tokens: Effective budget.
        num_kv_blocks: Blocks held.
        plan_counters: A copy.
        labels: The caller's.
        create_time_s: Wall clock, seconds since the epoch.
        last_active_time_s: Wall clock of the last command that changed it, or of its last turn's end.
    """

    session_id: str
    plan: DecodePlan
    revision: int
    num_tokens: int
    num_computed: int
    max_context_tokens: int
    num_kv_blocks: int
    plan_counters: PlanCounters
    labels: Mapping[str, str]
    create_time_s: float
    last_active_time_s: float


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Opens an empty session."""

    session_id: str
    plan: DecodePlan | None
    max_context_tokens: int | None
    defaults: SamplingDefaults
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GetSession:
    """Reads a session."""

    session_id: str


@dataclass(frozen=True, slots=True)
class UpdateSession:
    """Sets the mode from the session's next step on, and labels, key by key."""

    session_id: str
    expected_revision: int | None
    plan: DecodePlan | None
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Cancels a running turn and frees everything; answered with the last view."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Starts a turn; answered with the session's view.

    Attributes:
        session_id: On which session.
        generation_id: Drawn by the gateway.
        built_on_revision: The revision of the TurnBase that `input_ids` were made from.
        expected_revision: The revision that the caller expects; None where any will do.
        input_ids: What the turn appends.
        conversation: The session's conversation after that input, before the reply.
        sampling: Effective sampling.
        max_tokens: At most so many; None: up to the context.
        keeps_partial: What a cancel does.
        received_ns: Monotonic clock when the worker got the call; the turn's times start here.
    """

    session_id: str
    generation_id: str
    built_on_revision: int
    expected_revision: int | None
    input_ids: tuple[int, ...]
    conversation: Conversation
    sampling: Sampling
    max_tokens: int | None
    keeps_partial: bool
    received_ns: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a turn; answered with the session's view."""

    session_id: str
    generation_id: str


Command = OpenSession | GetSession | UpdateSession | CloseSession | Submit | Cancel
