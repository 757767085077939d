"""The engine thread: the one owner of scheduler, pool and model.

Commands come in through an inbox and are answered through futures; what steps have to
tell leaves as one StepReport per turn of a step. Nothing in here locks: one thread owns it all.
A round takes commands, ends what is overdue, then runs one step (`pipeline.py`), whose rows of
PLAN_ONCE run and are told before those of REPLAN: nobody waits for a plan that is not theirs, but for
the next step, by at most the REPLAN turns of this step. Commands and deadlines wait until a step is
launched whole, so that a session has one state per step; after a cancel has come in at most one more
step, and of it one run, starts for its turn. An idle engine has nothing in flight.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from worker import commands
from worker.commands import SessionView, TurnBase
from worker.errors import Refused
from worker.model.tokenizer import Tokenizer
from worker.pipeline import OnError, OnReport, Pipeline
from worker.runner import Runner
from worker.scheduler import PagedSessionScheduler
from worker.table import SessionTable


class Engine:
    """Runs sessions. `start` and `stop` it; `post` commands to it from any thread.

    Args:
        scheduler: Owned by the engine from now on, like `runner`.
        runner: Runs batches.
        tokenizer: For end-of-text ids and text.
        max_replan_sessions: Open sessions whose mode may be REPLAN at once.
        clock_ns: Monotonic clock, the same that deadlines are given by.

    Attributes:
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
        self._table = SessionTable(scheduler, tokenizer, clock_ns, max_replan_sessions=max_replan_sessions)
        self._pipeline = Pipeline(scheduler=scheduler, runner=runner, table=self._table, clock_ns=clock_ns)
        self._inbox: SimpleQueue[tuple[commands.Command, Future[SessionView]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.ended: Future[None] = Future()

    @property
    def num_free_blocks(self) -> int:
        """Free KV blocks; a single read, safe from any thread."""
        return self._scheduler.pool.num_free

    @property
    def num_steps(self) -> int:
        """Steps so far; see `Pipeline`."""
        return self._pipeline.num_steps

    @property
    def running_step_ns(self) -> int:
        """How long the running step has made no progress, 0 between steps; safe from any thread."""
        return self._pipeline.running_step_ns

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
        self._pipeline.listen(on_report, on_error)

        def run() -> None:
            try:
                prepare()
            except Exception as error:  # noqa: BLE001  handed to whoever waits for the start
                ready.set_exception(error)
                return
            ready.set_result(None)
            try:
                self._loop()
            except Exception as error:  # noqa: BLE001  a bug outside of every turn: told, then handed on
                self._pipeline.report(error)
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

    def _loop(self) -> None:
        while self._take_commands():
            self._table.expire()
            # Not behind the step: who was cancelled waits for none.
            self._pipeline.tell()
            if self._scheduler.has_work:
                self._pipeline.step()
            else:
                self._pipeline.settle()
        self._pipeline.drop()

    def _take_commands(self) -> bool:
        """Take every waiting command, or wait for one if there is nothing to run; False to stop."""
        is_idle = not self._scheduler.has_work and not self._pipeline.has_unread
        while is_idle or not self._inbox.empty():
            item = self._inbox.get()
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
        return True
