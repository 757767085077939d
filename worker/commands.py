"""Typed commands for the engine thread, the only way into it, and what they are answered with.

Values; nothing here acts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from worker.batch import DecodePlan, PlanCounters
from worker.model.chat import Conversation
from worker.params import Sampling, SamplingChoice, Stopping


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
    defaults: SamplingChoice


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as it stood between two steps.

    Attributes:
        session_id: Its id.
        plan: Effective mode.
        revision: Committed turns.
        num_tokens: Known tokens of the log, a running turn's included.
        num_computed: Tokens whose KV is stored.
        max_context_tokens: Effective budget.
        num_kv_blocks: Blocks held.
        plan_counters: A copy.
        labels: The caller's.
        priority: Of turns that choose none.
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
    priority: int
    create_time_s: float
    last_active_time_s: float


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Opens an empty session."""

    session_id: str
    plan: DecodePlan | None
    max_context_tokens: int | None
    defaults: SamplingChoice
    labels: Mapping[str, str]
    priority: int = 0


@dataclass(frozen=True, slots=True)
class GetSession:
    """Reads a session."""

    session_id: str


@dataclass(frozen=True, slots=True)
class UpdateSession:
    """Sets mode and priority from the session's next step on, and labels, key by key."""

    session_id: str
    expected_revision: int | None
    plan: DecodePlan | None
    labels: Mapping[str, str]
    priority: int | None = None


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
        stopping: When the turn ends.
        keeps_partial: Whether a cancel or a deadline commits what there is, or rolls the turn back.
        appends_only: Nothing is drawn: the turn ends when its input has KV.
        priority: None: the session's.
        received_ns: Monotonic clock when the worker got the call; the turn's times start here.
        deadline_ns: Monotonic clock at which nobody waits for it any more; None: never.
        queue_timeout_ns: Time it may wait for its first step; None: any.
        time_limit_ns: Time it may run from its first step on; None: any.
    """

    session_id: str
    generation_id: str
    built_on_revision: int
    expected_revision: int | None
    input_ids: tuple[int, ...]
    conversation: Conversation
    sampling: Sampling
    stopping: Stopping
    keeps_partial: bool
    received_ns: int
    appends_only: bool = False
    priority: int | None = None
    deadline_ns: int | None = None
    queue_timeout_ns: int | None = None
    time_limit_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a turn; answered with the session's view."""

    session_id: str
    generation_id: str


Command = OpenSession | GetSession | UpdateSession | CloseSession | Submit | Cancel
