"""The engine thread: the one owner of scheduler, pool and model.

Commands come in through an inbox and are answered through futures; what steps have to
tell leaves as one StepReport per turn of a step. Nothing in here locks: one thread owns it all.
A round takes commands, ends what is overdue, then runs one step: schedule, and for each
plan mode's rows in a turn of their own run, draw, commit, tell. PLAN_ONCE has the first
turn, and its tokens are told before a REPLAN row starts: nobody waits for a plan that is
not theirs, but for the next step, by at most the one REPLAN turn of this step. Commands
and deadlines wait for a step's last turn, so that a session has one state per step; after
a cancel has come in at most one more step, and of it one run, starts for its turn.
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from worker import commands
from worker.batch import Batch, Drawn, Row, RowResult, StepReport
from worker.commands import SessionView, TurnBase
from worker.errors import Refused
from worker.model.tokenizer import Tokenizer
from worker.runner import Runner
from worker.sampling import Draw, draw_tokens
from worker.scheduler import PagedSessionScheduler
from worker.table import SessionTable

OnReport = Callable[[StepReport], None]
OnError = Callable[[Exception, str], None]


@dataclass(frozen=True, slots=True)
class _Computed:
    """One row that ran; nothing of its session has changed yet."""

    row: Row
    result: RowResult
    drawn: Drawn | None
    sample_ns: int

    @property
    def has_bad_logits(self) -> bool:
        return self.row.wants_logits and self.drawn is None


class Engine:
    """Runs sessions. `start` and `stop` it; `post` commands to it from any thread.

    Args:
        scheduler: Owned by the engine from now on, like `runner`.
        runner: Runs batches.
        tokenizer: For end-of-text ids and text.
        max_replan_sessions: Open sessions whose mode may be REPLAN at once.
        clock_ns: Monotonic clock, the same that deadlines are given by.

    Attributes:
        num_steps: Steps so far, the running one included: batches that were scheduled, each counted once
            whether its rows ran in one turn or in two.
        ended: Done when the thread has ended; holds what ended it where that was no `stop`. Commands are
            not answered any more then.
    """

    def __init__(
        self,
        *,
        scheduler: PagedSessionScheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        max_replan_sessions: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._vocab_size = tokenizer.vocab_size
        self._clock_ns = clock_ns
        self._table = SessionTable(scheduler, tokenizer, clock_ns, max_replan_sessions=max_replan_sessions)
        self._inbox: queue.SimpleQueue[tuple[commands.Command, Future[SessionView]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._turn_started_ns: int | None = None
        self.num_steps = 0
        self.ended: Future[None] = Future()

    @property
    def num_free_blocks(self) -> int:
        """Free KV blocks; a single read, safe from any thread."""
        return self._scheduler.pool.num_free

    @property
    def running_step_ns(self) -> int:
        """How long the running turn of a step has taken so far, 0 between steps; safe from any thread.

        A step that came to its second turn has made progress, so that what hangs is told by one turn.
        """
        started_ns = self._turn_started_ns
        return 0 if started_ns is None else self._clock_ns() - started_ns

    def start(self, *, prepare: Callable[[], None], on_report: OnReport, on_error: OnError) -> Future[None]:
        """Start the thread.

        Args:
            prepare: Called first in the engine thread: warm-up belongs to the thread that runs steps,
                since OpenMP gives every thread that computes a team of its own.
            on_report: Called in the engine thread, once for every turn of a step and for commands with news.
            on_error: Called in the engine thread with what made a step fail, and the id that tells it.

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
            try:
                self._loop(on_report, on_error)
            except Exception as error:  # noqa: BLE001  a bug outside of every turn: told, then handed on
                _report(error, on_error)
                self.ended.set_exception(error)
            else:
                self.ended.set_result(None)

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
        return self._table.turn_base(session_id)

    def _loop(self, on_report: OnReport, on_error: OnError) -> None:
        while self._take_commands():
            self._table.expire()
            # Not behind the step: who was cancelled waits for none.
            self._tell(on_report)
            if self._scheduler.has_work:
                self._step(on_report, on_error)

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
                future.set_result(self._table.handle(command))
            except Refused as refusal:
                future.set_exception(refusal)
            except Exception as error:  # noqa: BLE001  a bug in one command must not end the others
                future.set_exception(error)

    def _tell(self, on_report: OnReport) -> None:
        if events := self._table.take_events():
            on_report(StepReport(events))

    def _step(self, on_report: OnReport, on_error: OnError) -> None:
        batch = self._scheduler.schedule()
        if not batch.rows:
            self._give_up_first()
            self._tell(on_report)
            return
        self.num_steps += 1
        for turn in batch.turns():
            self._turn_started_ns = self._clock_ns()
            self._table.announce(turn)
            for computed in self._compute(turn, on_error):
                self._commit(computed, on_error)
            self._turn_started_ns = None
            self._tell(on_report)

    def _compute(self, batch: Batch, on_error: OnError) -> list[_Computed]:
        """Run rows of one plan mode and draw. Where that raises, each alone: those that still raise fail.

        Nothing has changed by then but KV that a row's own run writes once more, and a row's bits don't
        depend on its neighbours.
        """
        try:
            return self._run(batch)
        except Exception as error:  # noqa: BLE001  turns fail, the engine goes on
            error_id = _report(error, on_error)
            if len(batch.rows) == 1:
                self._fail(batch.rows[0], error_id)
                return []
        return [computed for row in batch.rows for computed in self._compute(Batch((row,)), on_error)]

    def _run(self, batch: Batch) -> list[_Computed]:
        # The logits are the plan's own buffer, good until the next run.
        logits, results = self._runner.run(batch)
        started_ns = self._clock_ns()
        draws = [self._draw_of(row) for row in batch.rows if row.wants_logits]
        drawn = draw_tokens(logits, draws, vocab_size=self._vocab_size)
        sample_ns = self._clock_ns() - started_ns
        of_row = iter(drawn)
        return [
            _Computed(row, result, next(of_row) if row.wants_logits else None, sample_ns)
            for row, result in zip(batch.rows, results, strict=True)
        ]

    def _draw_of(self, row: Row) -> Draw:
        record, turn = self._table.running(row.session_id)
        return Draw(
            sampling=turn.asked.sampling,
            log=record.session.token_ids,
            num_generated=record.session.num_generated,
            banned=turn.banned,
        )

    def _commit(self, computed: _Computed, on_error: OnError) -> None:
        """Commit and tell one row. Row by row, so that what raises here ends one turn and not all."""
        row = computed.row
        try:
            if computed.has_bad_logits:
                self._runner.zero(self._table.fail_numeric(row.session_id))
                return
            drawn_ids = [] if computed.drawn is None else [computed.drawn.token_id]
            self._scheduler.commit(Batch((row,)), drawn_ids)
            self._table.tell(row, computed.result, computed.drawn, sample_ns=computed.sample_ns)
        except Exception as error:  # noqa: BLE001  this turn fails, the engine goes on
            self._fail(row, _report(error, on_error))

    def _fail(self, row: Row, error_id: str) -> None:
        message = f"the step that computed this turn failed, error id {error_id}"
        self._table.fail(row.session_id, "INTERNAL", message, {"error_id": error_id})

    def _give_up_first(self) -> None:
        """Not even the first turn found blocks: it fails, so that the next one can go on."""
        first = self._scheduler.first_turn()
        if first is None:
            raise RuntimeError("turns are running and none of them is the first")
        self._table.fail(
            first.session_id,
            "KV_EXHAUSTED",
            "the KV pool has no blocks for this turn and none to reclaim",
            {"num_free_blocks": str(self._scheduler.pool.num_free)},
        )


def _report(error: Exception, on_error: OnError) -> str:
    error_id = secrets.token_hex(8)
    on_error(error, error_id)
    return error_id
