"""How many sessions may be in REPLAN at once, at the engine."""

from collections.abc import Callable, Iterator

import pytest

from tests.worker.engine_harness import Harness, token_ids
from worker import commands
from worker.batch import DecodePlan
from worker.errors import Refused
from worker.model.weights.gguf import GgufFile
from worker.params import SamplingChoice

ONCE, REPLAN = DecodePlan.PLAN_ONCE, DecodePlan.REPLAN


@pytest.fixture
def two(file: GgufFile) -> Iterator[Harness]:
    """An engine that takes two sessions in REPLAN."""
    harness = Harness(file, max_replan_sessions=2)
    harness.start()
    yield harness
    harness.stop()


def assert_refused(call: Callable[[], object], limit: int) -> None:
    with pytest.raises(Refused) as caught:
        call()
    assert (caught.value.reason, caught.value.field) == ("QUOTA_EXCEEDED", "decode_plan")
    assert caught.value.metadata == {"max_replan_sessions": str(limit)}
    assert str(limit) in caught.value.message


def to(harness: Harness, name: str, plan: DecodePlan | None) -> None:
    harness.ask(commands.UpdateSession(name, None, plan, {}))


def test_one_more_is_refused_and_was_never_there(two: Harness) -> None:
    two.open("a", REPLAN)
    two.open("b", REPLAN)
    assert_refused(lambda: two.open("c", REPLAN), 2)
    with pytest.raises(Refused, match="SESSION_NOT_FOUND"):
        two.view("c")
    two.open("c", ONCE)
    two.open("d")
    assert len(token_ids(two.run("c", (1, 2), max_tokens=2))) == 2


def test_a_refused_change_leaves_all_of_the_session_as_it_was(two: Harness) -> None:
    for name, plan in (("a", REPLAN), ("b", REPLAN), ("c", ONCE)):
        two.open(name, plan)
    before = two.view("c")
    assert_refused(lambda: two.ask(commands.UpdateSession("c", 0, REPLAN, {"k": "v"}, 7)), 2)
    assert two.view("c") == before
    # What does not ask for the mode, or has it already, is no change of it.
    two.ask(commands.UpdateSession("c", None, None, {"k": "v"}))
    to(two, "a", REPLAN)
    to(two, "b", None)
    assert [two.view(name).plan for name in "abc"] == [REPLAN, REPLAN, ONCE]


@pytest.mark.parametrize("how", ["switch", "close"])
def test_a_place_is_free_at_once(two: Harness, how: str) -> None:
    two.open("a", REPLAN)
    two.open("b", REPLAN)
    two.open("c")
    assert_refused(lambda: to(two, "c", REPLAN), 2)
    if how == "switch":
        to(two, "a", ONCE)
    else:
        two.ask(commands.CloseSession("a"))
    to(two, "c", REPLAN)
    assert_refused(lambda: two.open("d", REPLAN), 2)


def test_it_holds_in_the_middle_of_a_turn_too(two: Harness) -> None:
    two.open("a", REPLAN)
    two.open("b", REPLAN)
    two.open("c")
    two.submit("c", (1, 2), max_tokens=400)
    two.wait_for_token()
    assert_refused(lambda: to(two, "c", REPLAN), 2)
    to(two, "b", ONCE)
    to(two, "c", REPLAN)
    while two.wait_for_token().plan is not REPLAN:
        pass
    two.ask(commands.CloseSession("c"))


def test_sessions_that_name_no_mode_count_by_the_workers(file: GgufFile) -> None:
    harness = Harness(file, plan=REPLAN, max_replan_sessions=1)
    harness.start()
    harness.open("a")
    assert harness.view("a").plan is REPLAN
    assert_refused(lambda: harness.open("b"), 1)
    assert_refused(lambda: harness.ask(commands.OpenSession("b", REPLAN, None, SamplingChoice(), {})), 1)
    harness.open("b", ONCE)
    to(harness, "a", ONCE)
    harness.open("c")
    assert harness.view("c").plan is REPLAN
    harness.stop()


def test_none_may_be_the_limit(file: GgufFile) -> None:
    harness = Harness(file, max_replan_sessions=0)
    harness.start()
    assert_refused(lambda: harness.open("a", REPLAN), 0)
    harness.open("a")
    assert_refused(lambda: to(harness, "a", REPLAN), 0)
    assert len(token_ids(harness.run("a", (1,), max_tokens=2))) == 2
    harness.stop()
