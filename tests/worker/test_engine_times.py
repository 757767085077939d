"""The engine thread over a real tiny model: deadlines, queue timeouts, time limits, and who comes first."""

from collections.abc import Iterator

import pytest

from tests.worker.engine_harness import Harness, HeldSteps, failed, finished, token_ids
from worker import commands
from worker.batch import Finished, FinishReason, Started
from worker.errors import Refused
from worker.model.weights.gguf import GgufFile


@pytest.fixture
def narrow(file: GgufFile) -> Iterator[Harness]:
    """An engine that runs one turn at a time."""
    harness = Harness(file, max_step_rows=1)
    harness.start()
    yield harness
    harness.stop()


@pytest.mark.parametrize("keep", [False, True])
def test_a_turn_that_is_late_is_dropped_before_any_step(harness: Harness, *, keep: bool) -> None:
    harness.open("a")
    harness.clock.now_ns = 50
    events = harness.run("a", (1, 2), deadline_ns=50, keep=keep)
    assert harness.engine.num_steps == 0
    view = harness.view("a")
    if keep:
        assert [type(event).__name__ for event in events] == ["Started", "Finished"]
        assert_kept_late(finished(events), num_output=0)
        assert (view.num_tokens, view.revision, view.num_computed) == (2, 1, 0)
    else:
        (failure,) = events
        assert failed([failure]).reason == "DEADLINE_EXCEEDED"
        assert (view.num_tokens, view.revision, view.num_computed) == (0, 0, 0)
    assert len(token_ids(harness.run("a", (3,), max_tokens=2))) == 2


@pytest.mark.parametrize("keep", [False, True])
def test_a_deadline_ends_a_running_turn_by_its_policy(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, *, keep: bool
) -> None:
    harness.open("a")
    steps = HeldSteps(monkeypatch)
    harness.submit("a", (1, 2), max_tokens=400, deadline_ns=100, keep=keep)
    steps.started.get(timeout=30)
    harness.clock.now_ns = 100
    steps.go_on.set()
    events = harness.collect()["g-a"]
    # The step that had started is told, and no other starts.
    assert len(token_ids(events)) == 1
    view = harness.view("a")
    if keep:
        assert_kept_late(finished(events), num_output=1)
        assert (view.num_tokens, view.revision) == (3, 1)
    else:
        assert failed(events).reason == "DEADLINE_EXCEEDED"
        assert (view.num_tokens, view.revision) == (0, 0)
    assert steps.started.empty()


@pytest.mark.parametrize("is_cancel_first", [False, True])
def test_a_cancel_and_a_deadline_that_meet_keep_a_turn_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, *, is_cancel_first: bool
) -> None:
    """Whichever of them ends the turn says that it is kept; the other one finds nothing."""
    harness.open("a")
    steps = HeldSteps(monkeypatch)
    harness.submit("a", (1, 2), max_tokens=400, deadline_ns=100, keep=True)
    steps.started.get(timeout=30)
    if is_cancel_first:
        cancelling = harness.engine.post(commands.Cancel("a", "g-a"))
        harness.clock.now_ns = 100
        steps.go_on.set()
        cancelling.result(timeout=30)
        end = finished(harness.collect()["g-a"])
        assert (end.reason, end.is_late, end.revision) == (FinishReason.CANCELLED, False, 1)
    else:
        harness.clock.now_ns = 100
        steps.go_on.set()
        assert_kept_late(finished(harness.collect()["g-a"]), num_output=1)
        with pytest.raises(Refused, match="GENERATION_NOT_FOUND"):
            harness.ask(commands.Cancel("a", "g-a"))
    view = harness.view("a")
    assert (view.num_tokens, view.revision) == (3, 1)
    assert harness.events.empty()


def assert_kept_late(end: Finished, *, num_output: int) -> None:
    """A deadline ended the turn and what there was is in the log, which the end says."""
    assert (end.reason, end.is_late, end.revision) == (FinishReason.CANCELLED, True, 1)
    assert (end.usage.input_tokens, end.usage.output_tokens) == (2, num_output)


def test_a_queued_turn_leaves_the_queue_when_its_time_is_up(
    narrow: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        narrow.open(name)
    steps = HeldSteps(monkeypatch)
    narrow.submit("a", (1, 2), max_tokens=3, queue_timeout_ns=10)
    assert steps.started.get(timeout=30) == ("a",)
    waiting = [
        narrow.engine.post(narrow.submit_command(name, (5,), narrow.engine.turn_base(name), **times))
        for name, times in (("b", {"queue_timeout_ns": 99}), ("c", {"queue_timeout_ns": 101}))
    ]
    narrow.clock.now_ns = 100
    steps.go_on.set()
    events = narrow.collect(turns=3)
    for future in waiting:
        future.result(timeout=30)
    assert [type(event).__name__ for event in events["g-b"]] == ["Failed"]
    assert failed(events["g-b"]).reason == "QUEUE_TIMEOUT"
    assert narrow.view("b").num_tokens == 0
    # It had its first step in time, so that how long it runs is another matter.
    assert finished(events["g-a"]).usage.output_tokens == 3
    assert len(token_ids(events["g-c"])) == 8


def test_a_time_limit_counts_from_the_first_step_and_commits(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.open("a")
    steps = HeldSteps(monkeypatch)
    harness.clock.now_ns = 1000
    harness.submit("a", (1, 2), max_tokens=400, time_limit_ns=500)
    steps.started.get(timeout=30)
    harness.clock.now_ns = 1500
    steps.go_on.set()
    events = harness.collect()["g-a"]
    end = finished(events)
    assert (end.reason, end.usage.output_tokens, end.revision) == (FinishReason.TIME_LIMIT, 1, 1)
    assert (end.queue_ns, end.ttft_ns, end.e2e_ns) == (999, 1499, 1499)
    assert harness.view("a").num_tokens == 3
    assert steps.started.empty()


def test_time_in_the_queue_is_not_time_of_the_limit(harness: Harness) -> None:
    harness.open("a")
    harness.clock.now_ns = 1000
    end = finished(harness.run("a", (1, 2), max_tokens=3, time_limit_ns=500))
    assert (end.reason, end.queue_ns) == (FinishReason.MAX_TOKENS, 999)


def test_a_time_limit_may_end_a_prefill(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.open("a")
    steps = HeldSteps(monkeypatch)
    harness.submit("a", tuple(range(100)), time_limit_ns=500)
    steps.started.get(timeout=30)
    harness.clock.now_ns = 501
    steps.go_on.set()
    events = harness.collect()["g-a"]
    assert [type(event).__name__ for event in events] == ["Started", "Finished"]
    assert finished(events).reason is FinishReason.TIME_LIMIT
    view = harness.view("a")
    assert (view.num_tokens, view.num_computed, view.revision) == (100, 24, 1)
    # What was not computed then is computed when it is needed.
    cut = token_ids(harness.run("a", (7,), max_tokens=3))
    harness.open("b")
    assert token_ids(harness.run("b", (*range(100), 7), max_tokens=3)) == cut


def test_both_over_a_deadline_comes_before_a_time_limit(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", (1, 2), max_tokens=400, deadline_ns=200, time_limit_ns=50)
    harness.wait_for_token()
    harness.clock.now_ns = 10**9
    assert failed(harness.collect()["g-a"]).reason == "DEADLINE_EXCEEDED"


def test_the_engine_tells_how_long_its_step_has_been_running(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.open("a")
    steps = HeldSteps(monkeypatch)
    harness.submit("a", (1, 2), max_tokens=1)
    steps.started.get(timeout=30)
    harness.clock.now_ns += 700
    assert harness.engine.running_step_ns == 700
    steps.go_on.set()
    harness.collect()
    harness.view("a")
    assert harness.engine.running_step_ns == 0


def start_order(harness: Harness, turns: int) -> list[str]:
    """Ids of turns in the order of their first steps, once all are over."""
    found = []
    while turns:
        event = harness.events.get(timeout=30)
        if isinstance(event, Started):
            found.append(event.generation_id)
        turns -= type(event).__name__ == "Finished"
    return found


def test_turns_of_a_higher_priority_come_first_and_equals_as_they_arrive(
    narrow: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = HeldSteps(monkeypatch)
    narrow.open("first")
    narrow.submit("first", (1,), max_tokens=2)
    assert steps.started.get(timeout=30) == ("first",)
    posted = []
    for name, of_session, of_turn in (
        ("low", -5, None),
        ("early", 0, None),
        ("late", 0, None),
        ("asked", -9, 3),
        ("high", 7, None),
    ):
        posted.append(
            narrow.engine.post(
                commands.OpenSession(
                    name, None, None, narrow.engine.turn_base("first").defaults, {}, of_session
                )
            )
        )
        base = narrow.engine.turn_base("first")
        posted.append(
            narrow.engine.post(narrow.submit_command(name, (2,), base, max_tokens=2, priority=of_turn))
        )
    steps.go_on.set()
    order = start_order(narrow, 6)
    for future in posted:
        future.result(timeout=30)
    assert order == ["g-first", "g-high", "g-asked", "g-early", "g-late", "g-low"]


def test_a_new_priority_takes_effect_on_the_running_turn_unless_it_chose_its_own(
    narrow: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "chose", "follows"):
        narrow.open(name)
    steps = HeldSteps(monkeypatch)
    narrow.submit("first", (1,), max_tokens=2, priority=9)
    steps.started.get(timeout=30)
    posted = [
        narrow.engine.post(narrow.submit_command(name, (2,), narrow.engine.turn_base(name), **changes))
        for name, changes in (("chose", {"priority": 1}), ("follows", {}))
    ]
    posted += [
        narrow.engine.post(commands.UpdateSession(name, None, None, {}, priority))
        for name, priority in (("chose", 9), ("follows", 5))
    ]
    steps.go_on.set()
    assert start_order(narrow, 3) == ["g-first", "g-follows", "g-chose"]
    for future in posted:
        future.result(timeout=30)
    assert (narrow.view("chose").priority, narrow.view("follows").priority) == (9, 5)
