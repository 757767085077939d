"""An engine thread over a real tiny model, and what tests ask of it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from worker import commands
from worker.batch import Batch, DecodePlan, Event, Failed, Finished, StepReport, TokenDrawn
from worker.commands import SessionView, TurnBase
from worker.engine import Engine
from worker.kv.block_pool import BlockPool
from worker.kv.storage import KvStorage
from worker.model.chat import Conversation
from worker.model.llama import LlamaModel
from worker.model.tokenizer import Tokenizer
from worker.model.weights.gguf import GgufFile
from worker.params import Sampling, SamplingChoice, Stopping
from worker.runner import Launched, Runner
from worker.sampling import Draw
from worker.scheduler import PagedSessionScheduler
from worker.session import Session

BLOCK = 16


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 1

    def __call__(self) -> int:
        return self.now_ns


class Harness:
    """An engine, its events, and what a test asks of it.

    Args:
        file: The model.
        num_blocks: Size of the pool.
        max_context_tokens: Of the scheduler.
        max_step_rows: Rows of a step.
        clock_ns: The engine's clock; absent: one that a test moves.
        kernels: What computes.
        plan: Mode of sessions that choose none.
        max_replan_sessions: How many may be in REPLAN.
    """

    def __init__(
        self,
        file: GgufFile,
        num_blocks: int = 64,
        *,
        max_context_tokens: int = 512,
        max_step_rows: int = 8,
        clock_ns: Callable[[], int] | None = None,
        kernels: str = "native",
        plan: DecodePlan = DecodePlan.PLAN_ONCE,
        max_replan_sessions: int = 32,
    ) -> None:
        config = file.config
        self.storage = KvStorage(
            num_blocks=num_blocks,
            num_layers=config.num_layers,
            block_size=BLOCK,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
        )
        self.tokenizer = Tokenizer(file.tokenizer)
        self.runner = Runner(
            LlamaModel.from_gguf(file),
            self.storage,
            kernels=kernels,
            max_step_tokens=24,
            max_step_rows=max_step_rows,
            vocab_size=self.tokenizer.vocab_size,
        )
        self.scheduler = PagedSessionScheduler(
            BlockPool(num_blocks),
            block_size=BLOCK,
            max_step_tokens=24,
            max_step_rows=max_step_rows,
            max_context_tokens=max_context_tokens,
            plan=plan,
            has_token_classes=self.runner.has_token_classes,
        )
        self.clock = Clock()
        self.engine = Engine(
            scheduler=self.scheduler,
            runner=self.runner,
            tokenizer=self.tokenizer,
            max_replan_sessions=max_replan_sessions,
            clock_ns=clock_ns or self.clock,
        )
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.errors: list[Exception] = []
        self.error_ids: list[str] = []

    def start(self, on_report: Callable[[StepReport], None] | None = None) -> None:
        self.engine.start(prepare=lambda: None, on_report=on_report or self._collect, on_error=self._note)

    def _collect(self, report: StepReport) -> None:
        for event in report.events:
            self.events.put(event)

    def _note(self, error: Exception, error_id: str) -> None:
        self.errors.append(error)
        self.error_ids.append(error_id)

    def stop(self) -> None:
        """End the engine, in which no step may have failed unseen."""
        self.engine.stop()
        assert self.errors == []
        assert self.engine.ended.result(timeout=1) is None

    def ask(self, command: commands.Command) -> SessionView:
        return self.engine.post(command).result(timeout=30)

    def view(self, name: str) -> SessionView:
        return self.ask(commands.GetSession(name))

    def session(self, name: str) -> Session:
        """The scheduler's own record; to be read while nothing runs."""
        return self.scheduler._sessions[name]

    def open(self, name: str, plan: DecodePlan | None = None, *, priority: int = 0) -> None:
        self.ask(commands.OpenSession(name, plan, None, SamplingChoice(), {}, priority))

    def submit_command(
        self,
        name: str,
        ids: tuple[int, ...],
        base: TurnBase,
        *,
        max_tokens: int | None = 8,
        keep: bool = False,
        **changes: Any,
    ) -> commands.Submit:
        """A turn of `g-<name>`; `changes` replace fields of the command."""
        command = commands.Submit(
            session_id=name,
            generation_id=f"g-{name}",
            built_on_revision=base.revision,
            expected_revision=None,
            input_ids=ids,
            conversation=Conversation().with_raw_input("token ids"),
            sampling=Sampling(temperature=0.9, seed=1234),
            stopping=Stopping(max_tokens=max_tokens, eos_ids=self.tokenizer.eos_ids),
            keeps_partial=keep,
            received_ns=1,
        )
        return replace(command, **changes)

    def submit(self, name: str, ids: tuple[int, ...], **changes: Any) -> None:
        base = self.engine.turn_base(name)
        self.ask(self.submit_command(name, ids, base, **changes))

    def run(self, name: str, ids: tuple[int, ...], **changes: Any) -> list[Event]:
        """Submit, and all events of the turn."""
        self.submit(name, ids, **changes)
        return self.collect()[f"g-{name}"]

    def collect(self, turns: int = 1) -> dict[str, list[Event]]:
        """Events by generation, until that many turns are over."""
        found: dict[str, list[Event]] = {}
        while turns:
            event = self.events.get(timeout=30)
            found.setdefault(event.generation_id, []).append(event)
            turns -= isinstance(event, Finished | Failed)
        return found

    def wait_for_token(self) -> TokenDrawn:
        """The next token of any turn; events before it are gone."""
        while True:
            event = self.events.get(timeout=30)
            if isinstance(event, TokenDrawn):
                return event


def before_launches(monkeypatch: pytest.MonkeyPatch, do: Callable[[Batch], None]) -> None:
    """Call `do` in the engine's thread with every batch before it is launched."""
    real = Runner.launch

    def watched(runner: Runner, batch: Batch, draws: Sequence[Draw]) -> Launched:
        do(batch)
        return real(runner, batch, draws)

    monkeypatch.setattr(Runner, "launch", watched)


class HeldSteps:
    """Lets every step wait, once it has started, until `go_on` is set; `started` tells each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: SimpleQueue[tuple[str, ...]] = SimpleQueue()
        self.go_on = threading.Event()

        def hold(batch: Batch) -> None:
            self.started.put(tuple(row.session_id for row in batch.rows))
            self.go_on.wait(timeout=30)

        before_launches(monkeypatch, hold)


def token_ids(events: list[Event]) -> list[int]:
    return [event.drawn.token_id for event in events if isinstance(event, TokenDrawn)]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenDrawn | Finished))


def finished(events: list[Event]) -> Finished:
    """The last event, which has to be an end without failure."""
    assert isinstance(events[-1], Finished)
    return events[-1]


def failed(events: list[Event]) -> Failed:
    """The last event, which has to be a failure."""
    assert isinstance(events[-1], Failed)
    return events[-1]
