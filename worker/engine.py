"""The engine thread: the one owner of scheduler, pool and model.

Commands come in through an inbox and are answered through futures; what steps have to
tell leaves as one StepReport per step. Nothing in here locks: one thread owns it all.
A step is three verbs: schedule, run, commit. Commands are taken between steps, so after
a cancel has come in at most one more step starts for its turn.
"""

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from worker import commands
from worker.batch import Batch, Event, Failed, FinishReason, RowResult, StepReport
from worker.commands import SessionView, TurnBase
from worker.detokenize import Detokenizer
from worker.errors import Refused
from worker.model.chat import Conversation
from worker.model.tokenizer import Tokenizer
from worker.record import Record
from worker.runner import Runner
from worker.sampling import Draw, draw_tokens
from worker.scheduler import PagedSessionScheduler
from worker.session import Generation
from worker.turn import Turn

# Ids that are still told from ids that never were.
_MAX_CLOSED = 10_000


class Engine:
    """Runs sessions. `start` and `stop` it; `post` commands to it from any thread.

    Args:
        scheduler: Owned by the engine from now on, like `runner`.
        tokenizer: For end-of-text ids and text.
    """

    def __init__(self, *, scheduler: PagedSessionScheduler, runner: Runner, tokenizer: Tokenizer) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._inbox: queue.SimpleQueue[tuple[commands.Command, Future[SessionView]] | None] = (
            queue.SimpleQueue()
        )
        self._records: dict[str, Record] = {}
        self._bases: dict[str, TurnBase] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._events: list[Event] = []
        self._thread: threading.Thread | None = None
        self.num_steps = 0

    @property
    def num_free_blocks(self) -> int:
        """Free KV blocks; a single read, safe from any thread."""
        return self._scheduler.pool.num_free

    def start(
        self,
        *,
        prepare: Callable[[], None],
        on_report: Callable[[StepReport], None],
        on_error: Callable[[Exception], None],
    ) -> Future[None]:
        """Start the thread.

        Args:
            prepare: Called first in the engine thread: warm-up belongs to the thread that runs steps,
                since OpenMP gives every thread that computes a team of its own.
            on_report: Called in the engine thread, once for every step or command with news.
            on_error: Called in the engine thread with what made a step fail.

        Returns:
            Done when `prepare` is; holds its exception, and then the thread has ended.
        """
        ready: Future[None] = Future()

        def run() -> None:
            try:
                prepare()
            except Exception as error:  # noqa: BLE001  handed to whoever waits for the start
                ready.set_exception(error)
                return
            ready.set_result(None)
            self._loop(on_report, on_error)

        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()
        return ready

    def stop(self) -> None:
        """End the thread after the running step; open turns are not reported any more."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()

    def post(self, command: commands.Command) -> Future[SessionView]:
        """Hand a command to the engine; the future holds its answer or `Refused`."""
        future: Future[SessionView] = Future()
        self._inbox.put((command, future))
        return future

    def turn_base(self, session_id: str) -> TurnBase:
        """What a turn submitted now builds on. Refused: SESSION_NOT_FOUND, SESSION_CLOSED."""
        base = self._bases.get(session_id)
        if base is None:
            raise self._missing(session_id)
        return base

    def _loop(self, on_report: Callable[[StepReport], None], on_error: Callable[[Exception], None]) -> None:
        while self._take_commands():
            if self._scheduler.has_work:
                self._step(on_error)
            if self._events:
                on_report(StepReport(tuple(self._events)))
                self._events.clear()

    def _take_commands(self) -> bool:
        """Take every waiting command, or wait for one if there is nothing to run; False to stop."""
        is_idle = not self._scheduler.has_work
        while True:
            try:
                item = self._inbox.get(block=is_idle)
            except queue.Empty:
                return True
            if item is None:
                return False
            is_idle = False
            command, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._handle(command))
            except Refused as refusal:
                future.set_exception(refusal)
            except Exception as error:  # noqa: BLE001  a bug in one command must not end the others
                future.set_exception(error)

    def _handle(self, command: commands.Command) -> SessionView:
        match command:
            case commands.OpenSession():
                return self._open(command)
            case commands.Submit():
                return self._submit(command)
        record = self._record(command.session_id)
        match command:
            case commands.UpdateSession():
                record.check_revision(command.expected_revision)
                record.update(command.plan, command.labels)
            case commands.Cancel():
                turn = record.turn
                if turn is None or turn.generation.generation_id != command.generation_id:
                    raise Refused("GENERATION_NOT_FOUND", "no such generation runs on this session")
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

    def _open(self, command: commands.OpenSession) -> SessionView:
        session = self._scheduler.open(
            command.session_id, plan=command.plan, max_context_tokens=command.max_context_tokens
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
        if session.generation is None and command.built_on_revision != session.revision:
            raise Refused("STALE_BASE", "the session moved on while the input was prepared")
        generation = Generation(
            generation_id=command.generation_id,
            input_ids=command.input_ids,
            sampling=command.sampling,
            max_tokens=command.max_tokens,
            eos_ids=self._tokenizer.eos_ids,
            keeps_partial=command.keeps_partial,
        )
        self._scheduler.submit(session, generation)
        record.turn = Turn(
            session=session,
            generation=generation,
            conversation=command.conversation,
            detokenizer=Detokenizer(self._tokenizer.token_bytes),
            received_ns=command.received_ns,
        )
        return record.view()

    def _step(self, on_error: Callable[[Exception], None]) -> None:
        now_ns = time.monotonic_ns()
        batch = self._scheduler.schedule()
        if not batch.rows:  # the scheduler promises that the first turn can go on: a bug, not a state
            on_error(RuntimeError("turns are running and none of them can go on"))
            for record in self._records.values():
                self._fail(record)
            return
        rows = [self._records[row.session_id] for row in batch.rows]
        turns = [record.turn for record in rows if record.turn is not None]
        self._events.extend(turn.start(now_ns) for turn in turns if not turn.is_announced)
        try:
            self._run(batch)
        except Exception as error:  # noqa: BLE001  the step's turns fail, the engine goes on
            on_error(error)
            for record in rows:
                self._fail(record)

    def _run(self, batch: Batch) -> None:
        logits, results = self._runner.run(batch)
        drawing = [row for row in batch.rows if row.wants_logits]
        draws = [
            Draw(self._turn(row.session_id).generation.sampling, position=row.context_len) for row in drawing
        ]
        started_ns = time.monotonic_ns()
        drawn = draw_tokens(logits.numpy(), draws, vocab_size=self._tokenizer.vocab_size)
        now_ns = time.monotonic_ns()
        self._scheduler.commit(batch, drawn)
        self.num_steps += 1
        self._tell(batch, results, sample_ns=now_ns - started_ns, now_ns=now_ns)

    def _tell(self, batch: Batch, results: tuple[RowResult, ...], *, sample_ns: int, now_ns: int) -> None:
        """Turn a committed step into events and end the turns that are over."""
        for row, result in zip(batch.rows, results, strict=True):
            record = self._records[row.session_id]
            turn = self._turn(row.session_id)
            record.session.plan_counters.count(result)
            turn.generation.plan_counters.count(result)
            if not row.wants_logits:
                continue
            self._events.append(turn.token(result, row.plan, sample_ns=sample_ns, now_ns=now_ns))
            reason = turn.end_reason()
            if reason is not None:
                self._end(record, turn, reason)

    def _end(self, record: Record, turn: Turn, reason: FinishReason) -> None:
        """End a turn: commit it, or roll it back if it was cancelled and its policy says so."""
        keep = reason is not FinishReason.CANCELLED or turn.generation.keeps_partial
        if not turn.is_announced:  # it never came to a step, and a stream begins with its start all the same
            self._events.append(turn.start(time.monotonic_ns()))
        usage = turn.usage
        self._scheduler.finish(record.session, keep=keep)
        if keep:
            last_id = record.session.token_ids[-1]
            record.conversation = turn.conversation.after_reply(
                closed_by_eos=last_id in self._tokenizer.eos_ids
            )
        self._events.append(turn.finish(reason, usage, now_ns=time.monotonic_ns()))
        self._settle(record)

    def _fail(self, record: Record) -> None:
        turn = record.turn
        if turn is None:
            return
        self._scheduler.finish(record.session, keep=False)
        self._events.append(
            Failed(turn.generation.generation_id, "INTERNAL", "the step that computed this turn failed")
        )
        self._settle(record)

    def _settle(self, record: Record) -> None:
        record.turn = None
        record.last_active_time_s = time.time()
        self._bases[record.session.session_id] = record.turn_base()

    def _record(self, session_id: str) -> Record:
        try:
            return self._records[session_id]
        except KeyError:
            raise self._missing(session_id) from None

    def _missing(self, session_id: str) -> Refused:
        if session_id in self._closed:
            return Refused("SESSION_CLOSED", "the session is closed", field="session_id")
        return Refused("SESSION_NOT_FOUND", "no session of this id", field="session_id")

    def _turn(self, session_id: str) -> Turn:
        turn = self._records[session_id].turn
        if turn is None:
            raise RuntimeError(f"session {session_id} has a row but no turn")
        return turn
