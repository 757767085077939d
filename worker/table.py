"""The sessions that the engine owns, what commands do to them, and how their turns end.

Knows no steps and no tensors. Everything runs in the engine's thread but `turn_base`, which reads values
that are replaced whole.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from worker import commands
from worker.batch import DecodePlan, Drawn, Event, Failed, FinishReason, Row, RowResult
from worker.commands import SessionView, TurnBase
from worker.detokenize import Detokenizer
from worker.errors import Refused
from worker.model.chat import Conversation
from worker.model.tokenizer import Tokenizer
from worker.record import Record
from worker.scheduler import PagedSessionScheduler
from worker.session import Generation
from worker.stops import StopMatcher
from worker.turn import NEVER_NS, Overdue, Turn

# Ids that are still told from ids that never were.
_MAX_CLOSED = 10_000
_NOTHING: Mapping[str, str] = MappingProxyType({})


class SessionTable:
    """Sessions by id, and the turns that run on them.

    Args:
        scheduler: Told of every session and turn.
        tokenizer: For text and EOS ids.
        clock_ns: Monotonic clock, of which all times of turns come.
        max_replan_sessions: Open sessions whose mode may be REPLAN at once.
    """

    def __init__(
        self,
        scheduler: PagedSessionScheduler,
        tokenizer: Tokenizer,
        clock_ns: Callable[[], int],
        *,
        max_replan_sessions: int,
    ) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._clock_ns = clock_ns
        self._max_replan_sessions = max_replan_sessions
        self._records: dict[str, Record] = {}
        self._bases: dict[str, TurnBase] = {}
        self._running: dict[str, Record] = {}  # by generation id
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._events: list[Event] = []
        self._due_ns = NEVER_NS  # no turn is overdue before

    def turn_base(self, session_id: str) -> TurnBase:
        """What a turn submitted now builds on. Refused: SESSION_NOT_FOUND, SESSION_CLOSED."""
        base = self._bases.get(session_id)
        if base is None:
            raise self._missing(session_id)
        return base

    def running(self, row: Row) -> Turn:
        """The turn that runs on a row's session."""
        turn = self._records[row.session_id].turn
        if turn is None:
            raise RuntimeError(f"session {row.session_id} has a row but no turn")
        return turn

    def _running_on(self, session_id: str) -> tuple[Record, Turn]:
        record = self._records[session_id]
        if record.turn is None:
            raise RuntimeError(f"session {session_id} has a row but no turn")
        return record, record.turn

    def take_events(self) -> tuple[Event, ...]:
        """What happened since the last call."""
        if not self._events:
            return ()
        events = tuple(self._events)
        self._events.clear()
        return events

    def handle(self, command: commands.Command) -> SessionView:
        """Do what a command says. Raises `Refused`, and then nothing has changed."""
        match command:
            case commands.OpenSession():
                return self._open(command)
            case commands.Submit():
                return self._submit(command)
        record = self._record(command.session_id)
        match command:
            case commands.UpdateSession():
                record.check_revision(command.expected_revision)
                if command.plan is DecodePlan.REPLAN and record.session.plan is not DecodePlan.REPLAN:
                    self._check_replan_quota()
                record.update(command.plan, command.labels, command.priority)
                # A running turn takes the priority too unless it chose its own.
                if command.priority is not None and (turn := record.turn) and turn.asked.priority is None:
                    self._scheduler.prioritise(turn.generation, command.priority)
            case commands.Cancel():
                turn = record.turn
                if turn is None or turn.generation.generation_id != command.generation_id:
                    raise Refused(
                        "GENERATION_NOT_FOUND",
                        "no such generation runs on this session",
                        field="generation_id",
                        metadata={"generation": command.generation_id},
                    )
                self._end(record, turn, FinishReason.CANCELLED)
            case commands.CloseSession():
                if record.turn is not None:
                    self._end(record, record.turn, FinishReason.CANCELLED)
                self._scheduler.close(record.session)
                del self._records[command.session_id], self._bases[command.session_id]
                self._closed[command.session_id] = None
                while len(self._closed) > _MAX_CLOSED:
                    self._closed.popitem(last=False)
        return record.view()

    def expire(self) -> None:
        """End every turn whose time has run out, queued ones too."""
        if (now_ns := self._clock_ns()) < self._due_ns:
            return
        for record in list(self._running.values()):
            session_id = record.session.session_id
            _, turn = self._running_on(session_id)
            match turn.overdue(now_ns):
                case Overdue.DEADLINE if turn.asked.keeps_partial:
                    self._end(record, turn, FinishReason.CANCELLED, is_late=True)
                case Overdue.DEADLINE:
                    self.fail(session_id, "DEADLINE_EXCEEDED", "the call's deadline has passed")
                case Overdue.QUEUE_TIMEOUT:
                    self.fail(session_id, "QUEUE_TIMEOUT", "no step came within queue_timeout")
                case Overdue.TIME_LIMIT:
                    self._end(record, turn, FinishReason.TIME_LIMIT)
        turns = (record.turn for record in self._running.values())
        self._due_ns = min((turn.due_ns for turn in turns if turn is not None), default=NEVER_NS)

    def announce(self, turns: Iterable[Turn]) -> None:
        """Tell the start of those turns that come to their first step."""
        new = [turn for turn in turns if not turn.is_announced]
        if new:
            now_ns = self._clock_ns()
            self._events += [turn.start(now_ns) for turn in new]
            self._due_ns = min(self._due_ns, *[turn.due_ns for turn in new])

    def tell(self, row: Row, turn: Turn, result: RowResult, drawn: Drawn | None, *, sample_ns: int) -> None:
        """Turn a committed row of a turn that runs into events, and end the turn if it is over."""
        turn.generation.plan_counters.count(result)
        reason = None
        if drawn is not None:
            now_ns = self._clock_ns()
            self._events.append(turn.token(drawn, result, row, sample_ns=sample_ns, now_ns=now_ns))
            reason = turn.end_reason()
        elif turn.asked.appends_only and self._scheduler.is_appended(turn.session):
            reason = FinishReason.APPENDED
        if reason is not None:
            self._end(self._records[row.session_id], turn, reason)

    def fail(
        self, session_id: str, reason: str, message: str, metadata: Mapping[str, str] = _NOTHING
    ) -> None:
        """End a session's turn as a failure: log and revision are as before it.

        Args:
            session_id: The session.
            reason: For the caller, like the two that follow.
            message: See there.
            metadata: See there.
        """
        record, turn = self._running_on(session_id)
        self._scheduler.finish(record.session, keep=False)
        self._events.append(Failed(turn.generation.generation_id, reason, message, metadata))
        self._settle(record, turn)

    def fail_numeric(self, row: Row) -> tuple[int, ...]:
        """End the turn of a row because of NaN or infinite logits, and give up all of its session's KV.

        Returns:
            The session's blocks and the row's that nobody holds now. They hold what must not reach anyone:
            zero them.
        """
        record, turn = self._running_on(row.session_id)
        held = self._scheduler.fail(record.session)
        # Since an unread row was launched its session may have been preempted: those that were taken, and
        # are held again, are written before they are read.
        lost = (block for block in row.block_table if self._scheduler.pool.num_holders(block) == 0)
        blocks = tuple(dict.fromkeys((*held, *lost)))
        message = "the model gave NaN or infinite logits for this session's log"
        self._events.append(Failed(turn.generation.generation_id, "NUMERIC_FAILURE", message))
        self._settle(record, turn)
        return blocks

    def _check_replan_quota(self) -> None:
        """Refused, QUOTA_EXCEEDED, if no more sessions may have the mode REPLAN."""
        limit = self._max_replan_sessions
        if sum(record.session.plan is DecodePlan.REPLAN for record in self._records.values()) >= limit:
            raise Refused(
                "QUOTA_EXCEEDED",
                f"the worker's limit of open sessions in REPLAN ({limit}, --max-replan-sessions) is reached: "
                "close one, or switch it to PLAN_ONCE",
                field="decode_plan",
                metadata={"max_replan_sessions": str(limit)},
            )

    def _open(self, command: commands.OpenSession) -> SessionView:
        if (command.plan or self._scheduler.plan) is DecodePlan.REPLAN:
            self._check_replan_quota()
        session = self._scheduler.open(
            command.session_id,
            plan=command.plan,
            max_context_tokens=command.max_context_tokens,
            priority=command.priority,
        )
        now_s = time.time()
        record = Record(
            session=session,
            defaults=command.defaults,
            conversation=Conversation(),
            labels=dict(command.labels),
            create_time_s=now_s,
            last_active_time_s=now_s,
        )
        self._records[session.session_id] = record
        self._bases[session.session_id] = record.turn_base()
        return record.view()

    def _submit(self, command: commands.Submit) -> SessionView:
        record = self._record(command.session_id)
        session = record.session
        record.check_revision(command.expected_revision)
        if command.generation_id in self._running:
            raise Refused("FIELD_INVALID", "a generation of this id is running", field="generation_id")
        if session.generation is None and command.built_on_revision != session.revision:
            raise Refused("STALE_BASE", "the session moved on while the input was prepared")
        generation = Generation(
            generation_id=command.generation_id,
            input_ids=command.input_ids,
            priority=session.priority if command.priority is None else command.priority,
            appends_only=command.appends_only,
            max_tokens=command.stopping.max_tokens,
        )
        self._scheduler.submit(session, generation)
        record.turn = turn = Turn(
            session=session,
            generation=generation,
            asked=command,
            detokenizer=Detokenizer(self._tokenizer.token_bytes),
            stops=StopMatcher(command.stopping.stop_sequences),
        )
        self._running[command.generation_id] = record
        self._due_ns = min(self._due_ns, turn.due_ns)
        return record.view()

    def _end(self, record: Record, turn: Turn, reason: FinishReason, *, is_late: bool = False) -> None:
        """End a turn: commit it, or roll it back if it was cancelled and its policy says so."""
        keep = reason is not FinishReason.CANCELLED or turn.asked.keeps_partial
        if not turn.is_announced:  # it never came to a step, and a stream begins with its start all the same
            self._events.append(turn.start(self._clock_ns()))
        usage = turn.usage
        self._scheduler.finish(record.session, keep=keep)
        if keep:
            self._commit_conversation(record, turn)
        self._events.append(turn.finish(reason, usage, now_ns=self._clock_ns(), is_late=is_late))
        self._settle(record, turn)

    def _commit_conversation(self, record: Record, turn: Turn) -> None:
        record.conversation = turn.asked.conversation
        if not turn.asked.appends_only:
            last_id = record.session.token_ids[-1]
            record.conversation = record.conversation.after_reply(
                closed_by_eos=last_id in self._tokenizer.eos_ids
            )

    def _settle(self, record: Record, turn: Turn) -> None:
        record.turn = None
        del self._running[turn.generation.generation_id]
        record.last_active_time_s = time.time()
        self._bases[record.session.session_id] = record.turn_base()

    def _record(self, session_id: str) -> Record:
        try:
            return self._records[session_id]
        except KeyError:
            raise self._missing(session_id) from None

    def _missing(self, session_id: str) -> Refused:
        reason, message = "SESSION_NOT_FOUND", "no session has this id"
        if session_id in self._closed:
            reason, message = "SESSION_CLOSED", "the session is closed"
        return Refused(reason, message, field="session_id", metadata={"session": session_id})
