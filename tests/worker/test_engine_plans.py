"""The engine thread over a real tiny model: whose rows run when, and modes that change at any token."""

import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.worker.engine_harness import Harness, HeldSteps, before_launches, failed, finished, token_ids
from worker import commands
from worker.batch import Batch, DecodePlan, Event, PlanAction, StepReport, TokenDrawn
from worker.model.weights.gguf import GgufFile

ONCE, REPLAN = DecodePlan.PLAN_ONCE, DecodePlan.REPLAN
NUM_TOKENS = 8


@pytest.fixture(params=["native", "reference"])
def either(file: GgufFile, request: pytest.FixtureRequest) -> Iterator[Harness]:
    """A started engine on one set of kernels or the other."""
    harness = Harness(file, kernels=request.param)
    harness.start()
    yield harness
    harness.stop()


def plans_of(events: list[Event]) -> list[DecodePlan]:
    return [event.plan for event in events if isinstance(event, TokenDrawn)]


def test_plan_once_tokens_are_told_before_a_replan_row_runs(
    file: GgufFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(file)
    told: list[str] = []
    runs: list[tuple[str, ...]] = []
    missing: list[tuple[list[str], list[tuple[str, ...]]]] = []

    def watch(batch: Batch) -> None:
        assert len({row.plan for row in batch.rows}) == 1
        if batch.rows[0].plan is REPLAN and told.count("g-once") != sum("once" in run for run in runs):
            missing.append((list(told), list(runs)))
        runs.append(tuple(row.session_id for row in batch.rows))

    def collect(report: StepReport) -> None:
        told.extend(event.generation_id for event in report.events if isinstance(event, TokenDrawn))
        harness._collect(report)

    before_launches(monkeypatch, watch)
    harness.start(collect)
    harness.open("once")
    harness.open("replan", REPLAN)
    harness.submit("replan", (4, 5), max_tokens=40)
    harness.submit("once", (1, 2, 3), max_tokens=40)
    events = harness.collect(turns=2)
    harness.stop()
    assert missing == []
    both = sum(pair == (("once",), ("replan",)) for pair in pairwise(runs))
    assert both > 20
    assert len(token_ids(events["g-once"])) == len(token_ids(events["g-replan"])) == 40
    # A step is one, whether its rows ran in one turn or in two.
    assert harness.engine.num_steps == len(runs) - both


class HeldTurns:
    """From `arm` on holds runs of one mode until `go_on` is set; `held` is set once one is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: DecodePlan) -> None:
        self.arm, self.held, self.go_on = threading.Event(), threading.Event(), threading.Event()

        def hold(batch: Batch) -> None:
            if batch.rows[0].plan is plan and self.arm.is_set():
                self.held.set()
                assert self.go_on.wait(timeout=30)

        before_launches(monkeypatch, hold)


@pytest.mark.parametrize("end", ["cancel", "close", "deadline"])
@pytest.mark.parametrize("held", list(DecodePlan))
def test_what_ends_a_turn_amid_a_step_lets_at_most_one_more_run_start(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, held: DecodePlan, end: str
) -> None:
    """It comes while a turn of one mode runs; of either mode's session no step after this one runs."""
    names = {ONCE: "once", REPLAN: "replan"}
    runs: dict[str, int] = dict.fromkeys(names.values(), 0)
    turns = HeldTurns(monkeypatch, held)

    def count(batch: Batch) -> None:
        for row in batch.rows:
            runs[row.session_id] += 1

    before_launches(monkeypatch, count)
    for plan, name in names.items():
        harness.open(name, plan)
    for name in names.values():
        late = {"deadline_ns": 500} if end == "deadline" else {}
        harness.submit(name, (1, 2, 3), max_tokens=400, **late)
    while not all(runs.values()):
        harness.wait_for_token()
    turns.arm.set()
    assert turns.held.wait(timeout=30)
    before = dict(runs)
    if end == "deadline":
        harness.clock.now_ns = 500
    posted = [
        harness.engine.post(
            commands.Cancel(name, f"g-{name}") if end == "cancel" else commands.CloseSession(name)
        )
        for name in (names.values() if end != "deadline" else ())
    ]
    turns.go_on.set()
    events = harness.collect(turns=2)
    for future in posted:
        future.result(timeout=30)
    # The run that is held is counted; behind one of PLAN_ONCE the step's REPLAN rows have theirs.
    more = {name: runs[name] - before[name] for name in runs}
    assert all(count <= 1 for count in more.values()), more
    for name in names.values():
        last = events[f"g-{name}"]
        assert failed(last).reason == "DEADLINE_EXCEEDED" if end == "deadline" else finished(last)


def test_each_turn_of_a_step_has_a_time_of_its_own(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway takes a worker for hanging by it: a second turn is progress."""
    seen: dict[DecodePlan, list[int]] = {ONCE: [], REPLAN: []}

    def look(batch: Batch) -> None:
        plan = batch.rows[0].plan
        seen[plan].append(harness.engine.running_step_ns)
        harness.clock.now_ns += 700
        seen[plan].append(harness.engine.running_step_ns)

    before_launches(monkeypatch, look)
    for name, plan in (("a", ONCE), ("b", REPLAN)):
        harness.open(name, plan)
        harness.submit(name, (1, 2), max_tokens=6)
    harness.collect(turns=2)
    harness.view("a")
    assert harness.engine.running_step_ns == 0
    for times in seen.values():
        assert len(times) >= 12
        assert set(times[::2]) == {0}
        assert set(times[1::2]) == {700}


def test_a_failed_replan_turn_takes_nothing_from_plan_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.open("once")
    alone = token_ids(harness.run("once", (1, 2, 3), max_tokens=20))
    harness.ask(commands.CloseSession("once"))

    def fail(batch: Batch) -> None:
        if batch.rows[0].plan is REPLAN:
            raise RuntimeError("plan")

    before_launches(monkeypatch, fail)
    harness.open("once")
    harness.open("replan", REPLAN)
    harness.submit("once", (1, 2, 3), max_tokens=20)
    harness.submit("replan", (1, 2, 3), max_tokens=20)
    events = harness.collect(turns=2)
    assert failed(events["g-replan"]).reason == "INTERNAL"
    assert token_ids(events["g-once"]) == alone
    assert [str(error) for error in harness.errors] == ["plan"]
    harness.errors.clear()


def flip_at(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, name: str, flips: dict[int, DecodePlan]
) -> list[Event]:
    """Run a turn of `NUM_TOKENS` whose mode is set while its n-th run, from 0, goes on."""
    num_runs = 0

    def flip(batch: Batch) -> None:
        nonlocal num_runs
        if num_runs in flips:
            harness.engine.post(commands.UpdateSession(name, None, flips[num_runs], {}))
        num_runs += 1

    with monkeypatch.context() as patch:
        before_launches(patch, flip)
        return harness.run(name, (5, 6, 7), max_tokens=NUM_TOKENS)


@pytest.mark.parametrize("first", list(DecodePlan))
def test_a_flip_at_any_token_changes_no_token_and_moves_the_counters(
    either: Harness, monkeypatch: pytest.MonkeyPatch, first: DecodePlan
) -> None:
    other = REPLAN if first is ONCE else ONCE
    either.open("alone")
    alone = token_ids(either.run("alone", (5, 6, 7), max_tokens=NUM_TOKENS))
    assert len(alone) == NUM_TOKENS
    for index in range(NUM_TOKENS):
        name = f"flip{index}"
        either.open(name, first)
        events = flip_at(either, monkeypatch, name, {index: other})
        assert token_ids(events) == alone
        # It takes effect with the next step.
        assert plans_of(events) == [first] * (index + 1) + [other] * (NUM_TOKENS - index - 1)
        counters = finished(events).plan_counters
        replans = plans_of(events).count(REPLAN)
        assert (counters.replans, counters.builds + counters.reuses) == (replans, NUM_TOKENS - replans)
        view = either.view(name)
        assert view.plan is other
        assert view.plan_counters == counters
        either.ask(commands.CloseSession(name))


def test_a_mode_that_flips_at_every_token_is_followed(
    either: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    either.open("alone")
    alone = token_ids(either.run("alone", (5, 6, 7), max_tokens=NUM_TOKENS))
    either.open("a")
    flips = {index: (REPLAN, ONCE)[index % 2] for index in range(NUM_TOKENS)}
    events = flip_at(either, monkeypatch, "a", flips)
    assert token_ids(events) == alone
    assert plans_of(events) == [ONCE, REPLAN] * (NUM_TOKENS // 2)
    actions = [event.result.plan_action for event in events if isinstance(event, TokenDrawn)]
    assert actions[1::2] == [PlanAction.REPLANNED] * (NUM_TOKENS // 2)
    # One plan is held all the while, and built at most once.
    assert PlanAction.BUILT not in actions[2::2]


def test_a_turn_that_waits_starts_in_the_mode_that_it_was_given_meanwhile(
    file: GgufFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = Harness(file, max_step_rows=1)
    narrow.start()
    narrow.open("first")
    narrow.open("waits")
    steps = HeldSteps(monkeypatch)
    narrow.submit("first", (1,), max_tokens=2)
    assert steps.started.get(timeout=30) == ("first",)
    base = narrow.engine.turn_base("waits")
    posted = [
        narrow.engine.post(narrow.submit_command("waits", (2,), base, max_tokens=3)),
        narrow.engine.post(commands.UpdateSession("waits", None, REPLAN, {})),
    ]
    steps.go_on.set()
    events = narrow.collect(turns=2)
    for future in posted:
        future.result(timeout=30)
    narrow.stop()
    assert plans_of(events["g-first"]) == [ONCE] * 2
    assert plans_of(events["g-waits"]) == [REPLAN] * 3
