"""The engine thread over a real tiny model: what the slices of one step promise each other."""

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.tiny_model import write_tiny_gguf
from worker import commands
from worker.batch import Batch, DecodePlan, Event, Failed, Finished, FinishReason, Started, TokenDrawn
from worker.commands import SamplingDefaults, SessionView
from worker.engine import Engine
from worker.errors import Refused
from worker.kv.block_pool import BlockPool
from worker.kv.storage import KvStorage
from worker.model.chat import Conversation
from worker.model.llama import LlamaModel
from worker.model.tokenizer import Tokenizer
from worker.model.weights.gguf import GgufFile, read_gguf
from worker.runner import Runner, StepLogits
from worker.scheduler import PagedSessionScheduler
from worker.session import Sampling

BLOCK = 16


class Harness:
    """An engine, its events, and what a test asks of it."""

    def __init__(self, file: GgufFile, num_blocks: int = 64) -> None:
        config = file.config
        storage = KvStorage(
            num_blocks=num_blocks,
            num_layers=config.num_layers,
            block_size=BLOCK,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
        )
        self.runner = Runner(
            LlamaModel.from_gguf(file), storage, kernels="reference", max_step_tokens=24, max_step_rows=8
        )
        self.scheduler = PagedSessionScheduler(
            BlockPool(num_blocks),
            block_size=BLOCK,
            max_step_tokens=24,
            max_step_rows=8,
            max_context_tokens=512,
        )
        self.tokenizer = Tokenizer(file.tokenizer)
        self.engine = Engine(scheduler=self.scheduler, runner=self.runner, tokenizer=self.tokenizer)
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.errors: list[Exception] = []

    def start(self) -> None:
        self.engine.start(
            prepare=lambda: None,
            on_report=lambda report: [self.events.put(event) for event in report.events],
            on_error=self.errors.append,
        )

    def ask(self, command: commands.Command) -> SessionView:
        return self.engine.post(command).result(timeout=30)

    def open(self, name: str, plan: DecodePlan = DecodePlan.PLAN_ONCE) -> None:
        self.ask(commands.OpenSession(name, plan, None, SamplingDefaults(), {}))

    def submit(self, name: str, ids: tuple[int, ...], *, max_tokens: int = 8, keep: bool = False) -> None:
        base = self.engine.turn_base(name)
        self.ask(
            commands.Submit(
                session_id=name,
                generation_id=f"g-{name}",
                built_on_revision=base.revision,
                expected_revision=None,
                input_ids=ids,
                conversation=Conversation().with_raw_input(),
                sampling=Sampling(0.9, 1234),
                max_tokens=max_tokens,
                keeps_partial=keep,
                received_ns=1,
            )
        )

    def collect(self, turns: int = 1) -> dict[str, list[Event]]:
        """Events by generation, until that many turns are over."""
        found: dict[str, list[Event]] = {}
        while turns:
            event = self.events.get(timeout=30)
            found.setdefault(event.generation_id, []).append(event)
            turns -= isinstance(event, Finished | Failed)
        return found


def _ids(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenDrawn)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path)
    return read_gguf(path)


@pytest.fixture
def harness(file: GgufFile) -> Iterator[Harness]:
    harness = Harness(file)
    harness.start()
    yield harness
    harness.engine.stop()
    assert harness.errors == []


def test_a_turn_tells_its_start_its_tokens_and_its_end(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", tuple(range(40)), max_tokens=5)
    started, *tokens, finished = harness.collect()["g-a"]
    assert isinstance(started, Started)
    assert started.usage.input_tokens == 40
    assert [token.index for token in tokens if isinstance(token, TokenDrawn)] == [0, 1, 2, 3, 4]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.revision) == (FinishReason.MAX_TOKENS, 1)
    assert (finished.plan_counters.builds, finished.plan_counters.reuses) == (1, 5)
    texts = [event.text for event in (*tokens, finished) if isinstance(event, TokenDrawn | Finished)]
    whole = b"".join(harness.tokenizer.token_bytes(token) for token in _ids(tokens))
    assert "".join(texts) == whole.decode("utf-8", errors="replace")


def test_s20_eight_turns_at_once_yield_what_each_yields_alone(file: GgufFile) -> None:
    prompts = {f"s{n}": tuple((7 * n + k) % 250 for k in range(3 + 9 * n)) for n in range(8)}
    alone = {}
    for name, ids in prompts.items():
        harness = Harness(file)
        harness.start()
        harness.open(name)
        harness.submit(name, ids, max_tokens=12)
        alone[name] = _ids(harness.collect()[f"g-{name}"])
        harness.engine.stop()
    together = Harness(file, num_blocks=24)
    together.start()
    for number, (name, ids) in enumerate(prompts.items()):
        together.open(name, DecodePlan.REPLAN if number % 2 else DecodePlan.PLAN_ONCE)
        together.submit(name, ids, max_tokens=12)
    events = together.collect(turns=8)
    together.engine.stop()
    assert {name: _ids(events[f"g-{name}"]) for name in prompts} == alone


def test_s03_s32_a_cancelled_turn_never_happened(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", tuple(range(20)), max_tokens=3)
    harness.collect()
    before = harness.ask(commands.GetSession("a"))
    free = harness.engine.num_free_blocks
    harness.submit("a", tuple(range(100)), max_tokens=400)
    steps = harness.engine.num_steps
    harness.ask(commands.Cancel("a", "g-a"))
    finished = harness.collect()["g-a"][-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.revision) == (FinishReason.CANCELLED, 1)
    after = harness.ask(commands.GetSession("a"))
    assert (after.num_tokens, after.num_computed, after.num_kv_blocks) == (
        before.num_tokens,
        before.num_computed,
        before.num_kv_blocks,
    )
    assert harness.engine.num_free_blocks == free
    assert harness.engine.num_steps - steps <= 2
    harness.submit("a", (9,), max_tokens=4)
    after_cancel = _ids(harness.collect()["g-a"])
    harness.open("b")
    harness.submit("b", tuple(range(20)), max_tokens=3)
    harness.collect()
    harness.submit("b", (9,), max_tokens=4)
    assert _ids(harness.collect()["g-b"]) == after_cancel


def test_a_cancel_that_keeps_commits_what_there_is(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", (1, 2, 3), max_tokens=400, keep=True)
    while not isinstance(harness.events.get(timeout=30), TokenDrawn):
        pass
    harness.ask(commands.Cancel("a", "g-a"))
    finished = harness.collect()["g-a"][-1]
    assert isinstance(finished, Finished)
    view = harness.ask(commands.GetSession("a"))
    assert (view.revision, view.num_tokens) == (1, 3 + finished.usage.output_tokens)


def test_the_plan_mode_may_change_at_any_token(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", (5, 6, 7), max_tokens=300)
    modes = []
    for plan in (DecodePlan.REPLAN, DecodePlan.PLAN_ONCE, DecodePlan.REPLAN):
        harness.ask(commands.UpdateSession("a", None, plan, {}))
        while True:
            event = harness.events.get(timeout=30)
            if isinstance(event, TokenDrawn) and event.plan is plan:
                modes.append(event.result.plan_action.name)
                break
    assert modes == ["REPLANNED", "REUSED", "REPLANNED"]
    harness.ask(commands.CloseSession("a"))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (commands.GetSession("nobody"), "SESSION_NOT_FOUND"),
        (commands.Cancel("a", "g-other"), "GENERATION_NOT_FOUND"),
        (commands.UpdateSession("a", 7, DecodePlan.REPLAN, {}), "REVISION_MISMATCH"),
        (commands.OpenSession("a", None, None, SamplingDefaults(), {}), "SESSION_EXISTS"),
    ],
)
def test_refused_commands(harness: Harness, command: commands.Command, reason: str) -> None:
    harness.open("a")
    with pytest.raises(Refused) as caught:
        harness.ask(command)
    assert caught.value.reason == reason
    assert harness.ask(commands.GetSession("a")).plan is DecodePlan.PLAN_ONCE


def test_s04_a_second_turn_is_refused_and_has_no_effect(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", (1, 2), max_tokens=100)
    with pytest.raises(Refused, match="SESSION_BUSY"):
        harness.submit("a", (3,))
    assert len(_ids(harness.collect()["g-a"])) == 100


def test_closing_ends_a_running_turn_and_frees_all(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", (1, 2), max_tokens=400)
    assert harness.ask(commands.CloseSession("a")).num_kv_blocks == 0
    finished = harness.collect()["g-a"][-1]
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.CANCELLED
    assert harness.engine.num_free_blocks == 64


def test_a_step_that_fails_ends_its_turns_and_nothing_else(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Runner.run

    def broken(self: Runner, batch: Batch) -> StepLogits:
        if any(row.token_ids[0] == 77 for row in batch.rows):
            raise RuntimeError("kernel")
        return real(self, batch)

    monkeypatch.setattr(Runner, "run", broken)
    harness.open("a")
    harness.submit("a", (77,))
    failed = harness.collect()["g-a"][-1]
    assert isinstance(failed, Failed)
    assert failed.reason == "INTERNAL"
    assert [str(error) for error in harness.errors] == ["kernel"]
    harness.errors.clear()
    harness.submit("a", (1,), max_tokens=2)
    assert len(_ids(harness.collect()["g-a"])) == 2


def test_a_start_that_fails_tells_why(file: GgufFile) -> None:
    def prepare() -> None:
        raise RuntimeError("no memory")

    ready = Harness(file).engine.start(prepare=prepare, on_report=print, on_error=print)
    with pytest.raises(RuntimeError, match="no memory"):
        ready.result(timeout=10)


def test_no_step_of_a_turn_starts_once_its_cancel_is_in(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, started, go_on = Runner.run, SimpleQueue[str](), threading.Event()

    def held(self: Runner, batch: Batch) -> StepLogits:
        started.put(batch.rows[0].session_id)
        go_on.wait(timeout=30)
        return real(self, batch)

    monkeypatch.setattr(Runner, "run", held)
    harness.open("a")
    harness.submit("a", (1, 2, 3), max_tokens=400)
    assert started.get(timeout=30) == "a"
    cancel = harness.engine.post(commands.Cancel("a", "g-a"))
    go_on.set()
    cancel.result(timeout=30)
    finished = harness.collect()["g-a"][-1]
    assert isinstance(finished, Finished)
    assert finished.usage.output_tokens == 1
    assert started.empty()
    assert harness.engine.num_free_blocks == 64
