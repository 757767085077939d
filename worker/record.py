"""What the engine keeps of a session beside the scheduler's part: caller's words and wall clocks."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from worker.batch import DecodePlan
from worker.commands import SessionView, TurnBase
from worker.errors import Refused
from worker.model.chat import Conversation
from worker.params import SamplingChoice
from worker.session import Session
from worker.turn import Turn

MAX_LABELS = 64


@dataclass(slots=True)
class Record:
    """One session of the engine.

    Attributes:
        session: The scheduler's part.
        defaults: Sampling that its turns fall back to.
        conversation: As of the last committed turn.
        labels: The caller's.
        create_time_s: Wall clock, seconds since the epoch.
        last_active_time_s: Wall clock of the last change.
        turn: The running turn, if any.
    """

    session: Session
    defaults: SamplingChoice
    conversation: Conversation
    labels: Mapping[str, str]
    create_time_s: float
    last_active_time_s: float
    turn: Turn | None = None

    def check_revision(self, expected: int | None) -> None:
        """Refused, REVISION_MISMATCH, if the session is not at the expected revision; None: any will do."""
        revision = self.session.revision
        if expected is not None and expected != revision:
            raise Refused(
                "REVISION_MISMATCH",
                f"the session is at revision {revision}, not {expected}",
                field="expected_revision",
                metadata={"revision": str(revision), "expected_revision": str(expected)},
            )

    def update(self, plan: DecodePlan | None, labels: Mapping[str, str], priority: int | None) -> None:
        """Set plan mode and priority where given, and add labels.

        Refused, with nothing changed: FIELD_OUT_OF_RANGE.
        """
        merged = {**self.labels, **labels}
        if len(merged) > MAX_LABELS:
            raise Refused(
                "FIELD_OUT_OF_RANGE",
                f"the session would have {len(merged)} labels, at most {MAX_LABELS} are kept",
                field="labels",
            )
        self.session.plan = plan or self.session.plan
        if priority is not None:
            self.session.priority = priority
        self.labels = merged
        self.last_active_time_s = time.time()

    def turn_base(self) -> TurnBase:
        """What the next turn builds on."""
        return TurnBase(
            revision=self.session.revision,
            num_tokens=self.session.num_tokens,
            max_context_tokens=self.session.max_context_tokens,
            conversation=self.conversation,
            defaults=self.defaults,
        )

    def view(self) -> SessionView:
        """The session as it stands, of a step that is not read yet only the blocks."""
        session = self.session
        return SessionView(
            session_id=session.session_id,
            plan=session.plan,
            revision=session.revision,
            num_tokens=session.num_known,
            num_computed=session.num_stored,
            max_context_tokens=session.max_context_tokens,
            num_kv_blocks=len(session.block_table),
            plan_counters=session.all_counters,
            labels=self.labels,
            priority=session.priority,
            create_time_s=self.create_time_s,
            last_active_time_s=self.last_active_time_s,
        )
