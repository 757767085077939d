"""The engine thread over a real tiny model: refusals, cancels, closes, failures."""

import threading
from queue import SimpleQueue

import pytest

from tests.worker.engine_harness import Harness, token_ids
from worker import commands
from worker.batch import Batch, DecodePlan, Failed, Finished, FinishReason, Started
from worker.commands import SamplingDefaults
from worker.errors import Refused
from worker.model.weights.gguf import GgufFile
from worker.runner import Runner, StepLogits
from worker.scheduler import PagedSessionScheduler


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
    assert len(token_ids(harness.collect()["g-a"])) == 100


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
    assert len(token_ids(harness.collect()["g-a"])) == 2


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


def test_a_turn_that_never_came_to_a_step_starts_and_finishes(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, started, go_on = Runner.run, SimpleQueue[str](), threading.Event()

    def held(self: Runner, batch: Batch) -> StepLogits:
        started.put("step")
        go_on.wait(timeout=30)
        return real(self, batch)

    monkeypatch.setattr(Runner, "run", held)
    for name in ("a", "b"):
        harness.open(name)
    harness.submit("a", (1, 2, 3), max_tokens=2)
    started.get(timeout=30)
    base = harness.engine.turn_base("b")
    queued = harness.engine.post(harness.submit_command("b", (1,), base))
    closed = harness.engine.post(commands.CloseSession("b"))
    go_on.set()
    queued.result(timeout=30)
    closed.result(timeout=30)
    assert [type(event) for event in harness.collect(turns=2)["g-b"]] == [Started, Finished]


def test_a_turn_built_on_an_older_revision_is_refused(harness: Harness) -> None:
    harness.open("a")
    base = harness.engine.turn_base("a")
    harness.submit("a", (1,), max_tokens=1)
    harness.collect()
    with pytest.raises(Refused, match="STALE_BASE"):
        harness.ask(harness.submit_command("a", (2,), base))


def test_closed_sessions_are_told_from_those_that_never_were(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", tuple(range(20)), max_tokens=1)
    harness.collect()
    view = harness.ask(commands.CloseSession("a"))
    assert (view.num_tokens, view.num_computed, view.num_kv_blocks) == (21, 0, 0)
    for ask in (lambda: harness.ask(commands.CloseSession("a")), lambda: harness.engine.turn_base("a")):
        with pytest.raises(Refused, match="SESSION_CLOSED"):
            ask()
    with pytest.raises(Refused, match="SESSION_NOT_FOUND"):
        harness.engine.turn_base("b")


def test_turns_that_cannot_go_on_fail_and_do_not_spin(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedSessionScheduler, "schedule", lambda self: Batch(()))
    harness.open("a")
    harness.submit("a", (1,))
    assert isinstance(harness.collect()["g-a"][-1], Failed)
    assert [str(error) for error in harness.errors] == ["turns are running and none of them can go on"]
    harness.errors.clear()
