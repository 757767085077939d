"""The engine thread over a real tiny model: refusals, cancels, closes."""

import pytest

from tests.worker.engine_harness import Harness, HeldSteps, token_ids
from worker import commands
from worker.batch import DecodePlan, Finished, FinishReason, Started
from worker.errors import Refused
from worker.model.weights.gguf import GgufFile
from worker.params import SamplingChoice


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (commands.GetSession("nobody"), "SESSION_NOT_FOUND"),
        (commands.Cancel("a", "g-other"), "GENERATION_NOT_FOUND"),
        (commands.UpdateSession("a", 7, DecodePlan.REPLAN, {}), "REVISION_MISMATCH"),
        (commands.OpenSession("a", None, None, SamplingChoice(), {}), "SESSION_EXISTS"),
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
        harness.submit("a", (3,), generation_id="g-other")
    assert len(token_ids(harness.collect()["g-a"])) == 100
    assert harness.view("a").num_tokens == 102


def test_s07_the_id_of_a_running_generation_is_refused_on_any_session(harness: Harness) -> None:
    for name in ("a", "b"):
        harness.open(name)
    harness.submit("a", (1, 2), max_tokens=400)
    for name in ("a", "b"):
        with pytest.raises(Refused, match="FIELD_INVALID") as caught:
            harness.submit(name, (3,), generation_id="g-a")
        assert caught.value.field == "generation_id"
    assert harness.view("b").num_tokens == 0
    assert len(token_ids(harness.collect()["g-a"])) == 400


def test_closing_ends_a_running_turn_and_frees_all(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", (1, 2), max_tokens=400)
    assert harness.ask(commands.CloseSession("a")).num_kv_blocks == 0
    finished = harness.collect()["g-a"][-1]
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.CANCELLED
    assert harness.engine.num_free_blocks == 64


def test_a_start_that_fails_tells_why(file: GgufFile) -> None:
    def prepare() -> None:
        raise RuntimeError("no memory")

    ready = Harness(file).engine.start(prepare=prepare, on_report=print, on_error=print)
    with pytest.raises(RuntimeError, match="no memory"):
        ready.result(timeout=10)


def test_no_step_of_a_turn_starts_once_its_cancel_is_in(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = HeldSteps(monkeypatch)
    harness.open("a")
    harness.submit("a", (1, 2, 3), max_tokens=400)
    assert steps.started.get(timeout=30) == ("a",)
    cancel = harness.engine.post(commands.Cancel("a", "g-a"))
    steps.go_on.set()
    cancel.result(timeout=30)
    finished = harness.collect()["g-a"][-1]
    assert isinstance(finished, Finished)
    assert finished.usage.output_tokens == 1
    assert steps.started.empty()
    assert harness.engine.num_free_blocks == 64


def test_a_turn_that_never_came_to_a_step_starts_and_finishes(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = HeldSteps(monkeypatch)
    for name in ("a", "b"):
        harness.open(name)
    harness.submit("a", (1, 2, 3), max_tokens=2)
    steps.started.get(timeout=30)
    base = harness.engine.turn_base("b")
    queued = harness.engine.post(harness.submit_command("b", (1,), base))
    closed = harness.engine.post(commands.CloseSession("b"))
    steps.go_on.set()
    queued.result(timeout=30)
    closed.result(timeout=30)
    assert [type(event) for event in harness.collect(turns=2)["g-b"]] == [Started, Finished]


def test_s05_a_queued_turn_that_is_cancelled_leaves_a_session_that_works(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = HeldSteps(monkeypatch)
    for name in ("a", "b"):
        harness.open(name)
    harness.submit("a", (1, 2, 3), max_tokens=2)
    steps.started.get(timeout=30)
    queued = harness.engine.post(harness.submit_command("b", (4, 5), harness.engine.turn_base("b")))
    cancelled = harness.engine.post(commands.Cancel("b", "g-b"))
    steps.go_on.set()
    queued.result(timeout=30)
    cancelled.result(timeout=30)
    harness.collect(turns=2)
    assert (harness.view("b").num_tokens, harness.view("b").revision) == (0, 0)
    after = token_ids(harness.run("b", (4, 5)))
    harness.open("c")
    assert token_ids(harness.run("c", (4, 5))) == after


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
