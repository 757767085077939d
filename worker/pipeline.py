"""The engine's steps: schedule, launch, read, commit, tell; on a device, launched ahead of what is read.

A step's rows run in turns, one of each plan mode and token class (`Batch.turns`). Each is launched, read,
committed and told on its own, so that PLAN_ONCE tokens are told before a REPLAN row starts.

On a device that draws by itself a turn of PLAN_ONCE is left unread, its sessions are counted on (`advance`),
and the next turn is launched on top of it, with UNKNOWN_TOKEN for what the device alone knows; then the
older is read, while the newer runs. So at most two are in flight, and one between steps. Only when the
older is committed do the sessions of the newer advance: whoever looks at a session sees one unread step at
most, and a session that proves finished has nothing to undo, its row of the newer just never counts. What
it wrote is behind every log, in blocks that later steps write before they read them. Knows no commands.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from worker.batch import Batch, DecodePlan, Drawn, Row, RowResult, StepReport
from worker.runner import Launched, Runner
from worker.sampling import Draw
from worker.scheduler import PagedSessionScheduler
from worker.table import SessionTable
from worker.turn import Turn

OnReport = Callable[[StepReport], None]
OnError = Callable[[Exception, str], None]


_Entry = tuple[Row, Turn]
"""A row, and the turn that it was scheduled for: its session may have another one by now, or none."""


class _Flight(NamedTuple):
    """A turn of a step that was launched."""

    entries: tuple[_Entry, ...]
    launched: Launched


class _Computed(NamedTuple):
    """A turn of a step that was read; nothing of its sessions has been told yet.

    Attributes:
        rows: With what came of each, None where no token was drawn after it or could be.
        sample_ns: Time to draw.
    """

    rows: tuple[tuple[_Entry, RowResult, Drawn | None], ...]
    sample_ns: int


class Pipeline:
    """Runs one step after the other. All of it belongs to the engine's thread but `running_step_ns`.

    Args:
        scheduler: Says what to run.
        runner: Runs it.
        table: Is told what came of it.
        clock_ns: Monotonic clock.

    Attributes:
        num_steps: Steps so far, the running one included: batches that were scheduled, each counted once
            however many turns its rows ran in.
    """

    def __init__(
        self,
        *,
        scheduler: PagedSessionScheduler,
        runner: Runner,
        table: SessionTable,
        clock_ns: Callable[[], int],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._table = table
        self._clock_ns = clock_ns
        self._on_report: OnReport = lambda _: None
        self._on_error: OnError = lambda *_: None
        self._unread: _Flight | None = None
        self._started_ns: int | None = None
        self.num_steps = 0

    @property
    def has_unread(self) -> bool:
        """Whether a step is in flight."""
        return self._unread is not None

    @property
    def running_step_ns(self) -> int:
        """How long nothing has been read while a turn of a step runs, else 0; safe from any thread."""
        return 0 if (started_ns := self._started_ns) is None else self._clock_ns() - started_ns

    def listen(self, on_report: OnReport, on_error: OnError) -> None:
        """Say whom to call, before the first step.

        Args:
            on_report: Called once for every turn of a step that was read, and by `tell`.
            on_error: Called with what made a step fail, and the id that tells it.
        """
        self._on_report, self._on_error = on_report, on_error

    def tell(self) -> None:
        """Report what has happened since the last report, if anything."""
        if events := self._table.take_events():
            self._on_report(StepReport(events))

    def report(self, error: Exception) -> str:
        """Tell an error, and return the id that it was told with."""
        error_id = secrets.token_hex(8)
        self._on_error(error, error_id)
        return error_id

    def _report_fault(self, error: Exception) -> str:
        """Tell what made a step fail. A lost device ends the engine: every later turn would fail, too."""
        error_id = self.report(error)
        self._runner.check_device()
        return error_id

    def step(self) -> None:
        """Run one step; where no turn can go on before the unread one is read, read that."""
        unread = self._unread
        batch = self._scheduler.schedule()
        if not batch.rows:
            if unread is None:
                self._give_up_first()
                self.tell()
            else:
                self.settle()
            return
        self.num_steps += 1
        for turn, entries in [(turn, self._entries(turn)) for turn in batch.turns()]:
            if turn.rows[0].plan is DecodePlan.REPLAN:
                self.settle()
            if unread is self._unread:
                self._launch(turn, entries)
            # What was unread when the rows were made tells another story now.
            elif entries := _as_now(entries):
                self._launch(_batch(entries), entries)

    def settle(self) -> None:
        """Read, commit and tell the unread step, if there is one."""
        flight, self._unread = self._unread, None
        if flight is not None:
            self._read(flight)

    def drop(self) -> None:
        """Wait until nothing is in flight, and forget what was."""
        flight, self._unread = self._unread, None
        self._started_ns = None
        if flight is not None:
            _wait_for(flight)

    def _entries(self, batch: Batch) -> tuple[_Entry, ...]:
        return tuple(zip(batch.rows, map(self._table.running, batch.rows), strict=True))

    def _launch(self, batch: Batch, entries: tuple[_Entry, ...]) -> None:
        """Launch a turn of a step, read what was unread before it, and it as well where it can't wait."""
        if self._started_ns is None:
            self._started_ns = self._clock_ns()
        self._table.announce(turn for _, turn in entries)
        try:
            draws = _draws(entries)
            may_wait = batch.rows[0].plan is DecodePlan.PLAN_ONCE and self._runner.runs_ahead(draws)
            flight = _Flight(entries, self._runner.launch(batch, draws))
        except Exception as error:  # noqa: BLE001  turns fail, the engine goes on
            error_id = self._report_fault(error)
            # It may be the unread step's fault: then that tells, and these rows are tried once more.
            is_alone = len(entries) == 1 and self._unread is None
            self.settle()
            self._salvage(entries, error_id, is_alone=is_alone)
            return
        older, self._unread = self._unread, None
        if older is not None and not self._read(older, newer=flight):
            return
        if may_wait:
            self._scheduler.advance(_batch(entry for entry in entries if entry[1].is_running))
            self._unread = flight
        else:
            self._read(flight)

    def _read(self, flight: _Flight, newer: _Flight | None = None) -> bool:
        """Read, commit and tell a turn of a step.

        Args:
            flight: What to read.
            newer: What was launched on top of it, whose sessions have not advanced.

        Returns:
            False where it failed: its rows have been tried again, and `newer` never was.
        """
        try:
            computed = _read_rows(flight)
        except Exception as error:  # noqa: BLE001  turns fail, the engine goes on
            error_id = self._report_fault(error)
            if newer is not None:
                _wait_for(newer)
            for _, turn in flight.entries:
                if turn.is_running:
                    turn.session.retract()
            self._salvage(flight.entries, error_id, is_alone=len(flight.entries) == 1)
            return False
        for entry, result, drawn in computed.rows:
            if entry[1].is_running:
                self._commit(entry, result, drawn, computed.sample_ns)
        self._started_ns = None if newer is None else self._clock_ns()
        self.tell()
        return True

    def _salvage(self, entries: Sequence[_Entry], error_id: str, *, is_alone: bool) -> None:
        """After a turn of a step that failed: run each row alone; those that still fail end their turns.

        Nothing has changed by then but KV that a row's own run writes once more, and a row's bits don't
        depend on its neighbours. A row that failed alone is not tried again.
        """
        for entry in _as_now(entries):
            if is_alone:
                self._fail(entry, error_id)
                continue
            try:
                launched = self._runner.launch(_batch((entry,)), _draws((entry,)))
                computed = _read_rows(_Flight((entry,), launched))
            except Exception as error:  # noqa: BLE001  this turn fails, the engine goes on
                self._fail(entry, self._report_fault(error))
            else:
                self._commit(*computed.rows[0], computed.sample_ns)
        self._started_ns = None
        self.tell()

    def _commit(self, entry: _Entry, result: RowResult, drawn: Drawn | None, sample_ns: int) -> None:
        """Commit and tell one row. Row by row, so that what raises here ends one turn and not all."""
        row, turn = entry
        try:
            if row.wants_logits and drawn is None:
                self._runner.zero(self._table.fail_numeric(row))
                return
            self._scheduler.commit(row, None if drawn is None else drawn.token_id)
            self._table.tell(row, turn, result, drawn, sample_ns=sample_ns)
        except Exception as error:  # noqa: BLE001  this turn fails, the engine goes on
            self._fail(entry, self._report_fault(error))

    def _fail(self, entry: _Entry, error_id: str) -> None:
        told = f"the step that computed this turn failed, error id {error_id}"
        self._table.fail(entry[0].session_id, "INTERNAL", told, {"error_id": error_id})

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


def _batch(entries: Iterable[_Entry]) -> Batch:
    return Batch(tuple([row for row, _ in entries]))


def _as_now(entries: Iterable[_Entry]) -> tuple[_Entry, ...]:
    """Rows as their sessions stand now, without those of turns that are over or have to come again."""
    rows = ((turn.session.row_now(row), turn) for row, turn in entries if turn.is_running)
    return tuple((row, turn) for row, turn in rows if row is not None)


def _draws(entries: Iterable[_Entry]) -> list[Draw]:
    """One for each row that wants logits. Their logs are the sessions' own: nothing is copied."""
    return [
        Draw(turn.asked.sampling, turn.session.token_ids, turn.session.num_generated, turn.banned)
        for row, turn in entries
        if row.wants_logits
    ]


def _read_rows(flight: _Flight) -> _Computed:
    """Wait for a turn of a step and read it."""
    entries, launched = flight
    step = launched.read()
    of_row = iter(step.drawn)
    drawn = [next(of_row) if row.wants_logits else None for row, _ in entries]
    return _Computed(tuple(zip(entries, step.results, drawn, strict=True)), step.sample_ns)


def _wait_for(flight: _Flight) -> None:
    """Wait for a turn of a step whose outcome nobody wants, a failure included."""
    with suppress(Exception):
        flight.launched.read()
