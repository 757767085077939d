"""One running turn as its caller sees it: text, times, ends, events. Knows no tensors and no blocks."""

from dataclasses import dataclass, field, replace
from enum import Enum

from worker.batch import (
    Drawn,
    Finished,
    FinishReason,
    Row,
    RowResult,
    Started,
    TokenDrawn,
    UsageCounts,
)
from worker.commands import Submit
from worker.detokenize import Detokenizer
from worker.session import Generation, Session
from worker.stops import StopMatcher

NEVER_NS = 2**63
"""Later than any time of a clock."""
_NOBODY: frozenset[int] = frozenset()


class Overdue(Enum):
    """Which of a turn's times has run out."""

    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue_timeout"
    TIME_LIMIT = "time_limit"


@dataclass(slots=True)
class Turn:
    """Turns the scheduler's numbers into events.

    Attributes:
        session: The turn's session.
        generation: The scheduler's record of the turn.
        asked: What was submitted.
        detokenizer: Fresh for this turn.
        stops: Fresh for this turn.
        is_announced: Whether `start` was told.
        last_ids: Tokens that end the turn.
    """

    session: Session
    generation: Generation
    asked: Submit
    detokenizer: Detokenizer
    stops: StopMatcher
    queue_ns: int = 0
    ttft_ns: int = 0
    last_token_ns: int = 0
    is_announced: bool = False
    met_sequence: str | None = None
    last_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.last_ids = self.asked.stopping.eos_ids | self.asked.stopping.stop_token_ids

    @property
    def usage(self) -> UsageCounts:
        """Counts so far; a drawn token that is not known yet is not counted."""
        return self._usage(self.session.num_generated - self.session.has_unknown)

    @property
    def is_running(self) -> bool:
        """Whether it still runs; by identity, since sessions and generations come again under old ids."""
        return self.session.generation is self.generation

    @property
    def banned(self) -> frozenset[int]:
        """Ids that the next token must not be: those that end the turn, before `min_tokens`."""
        min_tokens = self.asked.stopping.min_tokens
        return _NOBODY if min_tokens == 0 or self.session.num_generated >= min_tokens else self.last_ids

    @property
    def due_ns(self) -> int:
        """When `overdue` has something to tell at the earliest, as the turn stands now."""
        asked = self.asked
        limit_ns = asked.time_limit_ns if self.is_announced else asked.queue_timeout_ns
        since_ns = asked.received_ns + (self.queue_ns if self.is_announced else 0)
        due_ns = NEVER_NS if limit_ns is None else since_ns + limit_ns
        return due_ns if asked.deadline_ns is None else min(due_ns, asked.deadline_ns)

    def overdue(self, now_ns: int) -> Overdue | None:
        """What has run out at `now_ns`, if anything.

        The deadline comes first: behind it nobody is left to be told of a normal end.
        """
        asked = self.asked
        if asked.deadline_ns is not None and now_ns >= asked.deadline_ns:
            return Overdue.DEADLINE
        waited_ns = now_ns - asked.received_ns
        if not self.is_announced:
            timeout_ns = asked.queue_timeout_ns
            return Overdue.QUEUE_TIMEOUT if timeout_ns is not None and waited_ns >= timeout_ns else None
        limit_ns = asked.time_limit_ns
        return Overdue.TIME_LIMIT if limit_ns is not None and waited_ns >= self.queue_ns + limit_ns else None

    def start(self, now_ns: int) -> Started:
        """The turn entered its first step at `now_ns`."""
        self.is_announced = True
        self.queue_ns = now_ns - self.asked.received_ns
        return Started(
            generation_id=self.generation.generation_id,
            usage=self.usage,
            queue_ns=self.queue_ns,
            was_dropped=self.generation.reprefilled_tokens > 0,
        )

    def token(self, drawn: Drawn, result: RowResult, row: Row, *, sample_ns: int, now_ns: int) -> TokenDrawn:
        """`drawn`, which ends the log by now, was drawn after `row` and told at `now_ns`."""
        asked, session, generation = self.asked, self.session, self.generation
        itl_ns = now_ns - self.last_token_ns if self.last_token_ns else 0
        since_start_ns = now_ns - asked.received_ns
        self.last_token_ns = now_ns
        self.ttft_ns = self.ttft_ns or since_start_ns
        token_id, count = drawn.token_id, session.num_generated
        # Where the id itself ends the turn, no sequence does: the text stays whole.
        may_stop = count >= asked.stopping.min_tokens and token_id not in self.last_ids
        text, self.met_sequence = self.stops.push(self.detokenizer.push(token_id), may_stop=may_stop)
        # By position, and not by name, which would take twice as long as all before.
        return TokenDrawn(
            generation.generation_id,
            session.session_id,
            count - 1,
            drawn,
            text,
            self._usage(count),
            row.plan,
            result,
            since_start_ns,
            itl_ns,
            self.queue_ns,
            sample_ns,
            row.context_len,
        )

    def end_reason(self) -> FinishReason | None:
        """Why the turn is over after its last token; None while it is not.

        Of several reasons the first of this order is told: EOS, STOP_TOKEN, STOP_SEQUENCE, MAX_TOKENS,
        CONTEXT_FULL. TIME_LIMIT is looked at between steps, and so comes last.
        """
        session, stopping = self.session, self.asked.stopping
        last_id = session.token_ids[-1]
        if last_id in self.last_ids:
            return FinishReason.EOS if last_id in stopping.eos_ids else FinishReason.STOP_TOKEN
        if self.met_sequence is not None:
            return FinishReason.STOP_SEQUENCE
        if session.num_generated == stopping.max_tokens:
            return FinishReason.MAX_TOKENS
        if len(session.token_ids) >= session.max_context_tokens:
            return FinishReason.CONTEXT_FULL
        return None

    def finish(
        self, reason: FinishReason, usage: UsageCounts, *, now_ns: int, is_late: bool = False
    ) -> Finished:
        """The turn ended at `now_ns`; `usage` was taken before the scheduler let go of it."""
        return Finished(
            generation_id=self.generation.generation_id,
            reason=reason,
            stopped_by=self._stopped_by(reason),
            text="" if reason is FinishReason.STOP_SEQUENCE else self._held_text(),
            usage=usage,
            queue_ns=self.queue_ns,
            ttft_ns=self.ttft_ns,
            e2e_ns=now_ns - self.asked.received_ns,
            revision=self.session.revision,
            num_tokens=self.session.num_tokens,
            plan_counters=replace(self.generation.plan_counters),
            is_late=is_late,
        )

    def _usage(self, output_tokens: int) -> UsageCounts:
        turn = self.generation
        return UsageCounts(len(turn.input_ids), turn.cached_tokens, turn.reprefilled_tokens, output_tokens)

    def _stopped_by(self, reason: FinishReason) -> str | int | None:
        if reason is FinishReason.STOP_TOKEN:
            return self.session.token_ids[-1]
        return self.met_sequence if reason is FinishReason.STOP_SEQUENCE else None

    def _held_text(self) -> str:
        released, _ = self.stops.push(self.detokenizer.finish(), may_stop=False)
        return released + self.stops.finish()
