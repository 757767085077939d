"""Pipeline and session table over a fake device, step by step in the test's own thread."""

from typing import Any, cast

from tests.worker.fake_device import FakeDevice, FakeTokenizer, expected_tokens
from worker import commands
from worker.batch import DecodePlan, Event, StepReport, TokenDrawn
from worker.commands import SessionView, TurnBase
from worker.kv.block_pool import BlockPool
from worker.model.chat import Conversation
from worker.params import Sampling, SamplingChoice, Stopping
from worker.pipeline import Pipeline
from worker.scheduler import PagedSessionScheduler
from worker.session import Session
from worker.table import SessionTable


class Ahead:
    """What the engine's thread does, one round at a time.

    Args:
        device: What runs steps.
        tokens: Of a step, at most.
        rows: Likewise.
        context: Of a log.
    """

    def __init__(self, device: FakeDevice, *, tokens: int = 16, rows: int = 8, context: int = 64) -> None:
        self.device = device
        self.now_ns = 1000
        self.scheduler = PagedSessionScheduler(
            BlockPool(device.num_blocks),
            block_size=device.block_size,
            max_step_tokens=tokens,
            max_step_rows=rows,
            max_context_tokens=context,
            has_token_classes=device.has_token_classes,
        )
        self.table = SessionTable(
            self.scheduler, cast("Any", FakeTokenizer()), lambda: self.now_ns, max_replan_sessions=100
        )
        self.pipeline = Pipeline(
            scheduler=self.scheduler,
            runner=cast("Any", device),
            table=self.table,
            clock_ns=lambda: self.now_ns,
        )
        self.events: dict[str, list[Event]] = {}
        self.errors: list[Exception] = []
        self.pipeline.listen(self._hear, self._note)

    def _hear(self, report: StepReport) -> None:
        for event in report.events:
            self.events.setdefault(event.generation_id, []).append(event)

    def _note(self, error: Exception, _: str) -> None:
        """Keep what the device was made to raise; everything else is a bug, and ends the test."""
        if str(error) not in {"launch", "read"}:
            raise error
        self.errors.append(error)

    def session(self, name: str) -> Session:
        """The scheduler's own."""
        return self.scheduler._sessions[name]

    def view(self, name: str) -> SessionView:
        """As a call would get it."""
        return self.table.handle(commands.GetSession(name))

    def open(self, name: str, plan: DecodePlan | None = None) -> None:
        """A session."""
        self.table.handle(commands.OpenSession(name, plan, None, SamplingChoice(), {}))

    @staticmethod
    def command(
        name: str, ids: tuple[int, ...], base: TurnBase, generation_id: str = "", **asked: Any
    ) -> commands.Submit:
        """A turn; its id is the session's unless given. All but `stopping` are fields of Submit."""
        stopping = {"max_tokens": 8} | asked.pop("stopping", {})
        fields = {"sampling": Sampling(), "keeps_partial": False, "received_ns": 1000} | asked
        return commands.Submit(
            session_id=name,
            generation_id=generation_id or name,
            built_on_revision=base.revision,
            expected_revision=None,
            input_ids=ids,
            conversation=Conversation().with_raw_input("ids"),
            stopping=Stopping(**stopping),
            **fields,
        )

    def submit(self, name: str, ids: tuple[int, ...], generation_id: str = "", **asked: Any) -> None:
        """A turn, as `command` says."""
        asked = {"received_ns": self.now_ns} | asked
        self.table.handle(self.command(name, ids, self.table.turn_base(name), generation_id, **asked))

    def cancel(self, name: str, generation_id: str = "") -> None:
        """End a turn."""
        self.table.handle(commands.Cancel(name, generation_id or name))

    def round(self) -> bool:
        """What the engine does between two looks into its inbox; False where nothing is left to do."""
        self.now_ns += 10
        self.table.expire()
        self.pipeline.tell()
        if self.scheduler.has_work:
            self.pipeline.step()
        else:
            self.pipeline.settle()
        return self.scheduler.has_work or self.pipeline.has_unread

    def finish(self) -> dict[str, list[Event]]:
        """Rounds until the engine would be idle; all events so far, by generation."""
        for _ in range(10_000):
            if not self.round():
                assert not self.device.in_flight
                return self.events
        raise AssertionError("turns don't come to an end")


def make(*, num_blocks: int = 40, block_size: int = 4, **device: Any) -> Ahead:
    return Ahead(FakeDevice(num_blocks, block_size, **device))


def tokens_of(events: list[Event]) -> list[int]:
    return [event.drawn.token_id for event in events if isinstance(event, TokenDrawn)]


def told(ahead: Ahead, name: str) -> list[int]:
    return tokens_of(ahead.events.get(name, []))


def alone(ids: tuple[int, ...], max_tokens: int, *, ends: bool = False) -> list[int]:
    """The tokens of a turn that nothing cuts."""
    found, _ = expected_tokens(
        ids,
        max_tokens=max_tokens,
        max_context_tokens=1000,
        ends=dict.fromkeys((0, 1, 2), "") if ends else {},
        stop_sequence="",
        nan_every=0,
    )
    return found


def state_of(ahead: Ahead, name: str) -> tuple[object, ...]:
    session = ahead.session(name)
    counters = session.all_counters
    return (
        *(session.token_ids, session.class_borders, session.num_computed, session.num_settled),
        *(session.num_due, len(session.block_table), session.revision, session.generation),
        *(counters.builds, counters.reuses, counters.replans, counters.step_ns),
        ahead.scheduler.pool.num_free,
    )
