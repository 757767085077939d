"""Steps that are launched before the one before was read: what overlaps, and what nobody may notice of it."""

from typing import Any, cast

import pytest

from tests.worker.ahead_harness import Ahead, alone, make, state_of, tokens_of, told
from tests.worker.fake_device import FakeDevice, FakeTokenizer, draw_of
from worker import commands
from worker.batch import Batch, DecodePlan, Finished, FinishReason, TokenClass, TokenDrawn
from worker.engine import Engine
from worker.kv.block_pool import BlockPool
from worker.params import Sampling, SamplingChoice
from worker.scheduler import PagedSessionScheduler
from worker.session import Session

ENDS = {"eos_ids": frozenset({0, 1}), "stop_token_ids": frozenset({2})}


def an_early_end(min_tokens: int = 3) -> tuple[int, ...]:
    """A prompt whose turn is ended by one of `ENDS` after some tokens, long before any limit."""
    return next(
        ids for first in range(96) if min_tokens <= len(alone(ids := (first, 50, 51), 20, ends=True)) < 12
    )


def test_a_step_is_launched_before_the_one_before_is_read() -> None:
    ahead = make()
    ahead.open("a")
    ahead.submit("a", (5, 6, 7), stopping={"max_tokens": 4})
    ahead.finish()
    verbs = [verb for verb, _ in ahead.device.log]
    # The last one is known to end the turn by its number: nothing is launched on top of it.
    assert verbs == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]
    assert ahead.device.num_fed == 3
    assert told(ahead, "a") == alone((5, 6, 7), 4)


def test_where_the_runner_does_not_run_ahead_every_step_is_read_at_once() -> None:
    ahead = make(is_ahead=False)
    ahead.open("a")
    ahead.submit("a", (5, 6, 7), stopping={"max_tokens": 4})
    ahead.finish()
    assert [verb for verb, _ in ahead.device.log] == ["launch", "read"] * 4
    assert ahead.device.num_fed == 0


def test_a_draw_that_needs_the_log_has_it() -> None:
    """Where one row of a step has a penalty the step is read before the next is launched."""
    ahead = make()
    for name, penalty in (("a", 1.0), ("b", 1.5)):
        ahead.open(name)
        ahead.submit(name, (5, 6), sampling=Sampling(repetition_penalty=penalty), stopping={"max_tokens": 4})
    ahead.finish()
    assert [verb for verb, _ in ahead.device.log] == ["launch", "read"] * 4


@pytest.mark.parametrize("has_token_classes", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_session_that_proves_finished_is_as_without_overlap(*, keep: bool, has_token_classes: bool) -> None:
    """EOS, a stop token, a stop sequence: the step on top never happened, not for blocks nor counters."""
    prompt = an_early_end()
    sequence = "".join(chr(ord("a") + token % 26) for token in alone((9, 9, 9), 5)[3:])
    cases = [
        *((prompt, ENDS), ((9, 9, 9), {"stop_sequences": (sequence,)})),
        *(((7, 8), {"max_tokens": 3}), ((5,) * 11, {"max_tokens": 1})),
    ]
    states, events = [], []
    for is_ahead in (False, True):
        ahead = make(is_ahead=is_ahead, has_token_classes=has_token_classes)
        for number, (ids, stopping) in enumerate(cases):
            ahead.open(f"s{number}")
            ahead.submit(f"s{number}", ids, stopping={"max_tokens": 20} | stopping, keeps_partial=keep)
        events.append(ahead.finish())
        states.append([state_of(ahead, f"s{number}") for number in range(len(cases))])
        assert (ahead.device.num_fed > 0) is is_ahead
    assert states[0] == states[1]
    for name in events[0]:
        assert tokens_of(events[0][name]) == tokens_of(events[1][name])
        ends = [found[name][-1] for found in events]
        assert len({(end.reason, end.usage, end.text, end.stopped_by) for end in cast("Any", ends)}) == 1
    assert [cast("Any", events[1][f"s{n}"][-1]).reason for n in range(4)] == [
        FinishReason.STOP_TOKEN if alone(prompt, 20, ends=True)[-1] == 2 else FinishReason.EOS,
        *(FinishReason.STOP_SEQUENCE, FinishReason.MAX_TOKENS, FinishReason.MAX_TOKENS),
    ]


@pytest.mark.parametrize("keep", [False, True])
def test_a_cancel_while_a_step_is_unread_is_as_if_it_never_ran(*, keep: bool) -> None:
    ahead = make()
    ahead.open("a")
    ahead.submit("a", (5, 6, 7), stopping={"max_tokens": 30}, keeps_partial=keep)
    for _ in range(4):
        ahead.round()
    before = ahead.view("a")
    assert ahead.session("a").has_unknown
    # Three of four are read; the view is that of a log whose end is known.
    assert (before.num_tokens, before.num_computed) == (6, 5)
    ahead.cancel("a")
    after = ahead.view("a")
    assert (after.num_tokens, after.num_computed, after.revision) == ((6, 5, 1) if keep else (0, 0, 0))
    ahead.submit("a", (8,), "second", stopping={"max_tokens": 3})
    events = ahead.finish()
    assert [type(event).__name__ for event in events["a"]] == ["Started", *["TokenDrawn"] * 3, "Finished"]
    assert cast("Finished", events["a"][-1]).usage.output_tokens == 3
    log = (5, 6, 7, *alone((5, 6, 7), 3), 8) if keep else (8,)
    assert told(ahead, "second") == alone(log, 3)


def test_an_id_that_is_closed_and_opened_anew_gets_nothing_of_the_old_one() -> None:
    ahead = make()
    ahead.open("a")
    ahead.submit("a", (5, 6, 7), stopping={"max_tokens": 30})
    for _ in range(3):
        ahead.round()
    ahead.table.handle(commands.CloseSession("a"))
    ahead.open("a")
    ahead.submit("a", (8,), stopping={"max_tokens": 3})
    events = ahead.finish()["a"]
    ends = [number for number, event in enumerate(events) if isinstance(event, Finished)]
    assert len(ends) == 2
    assert tokens_of(events[ends[0] :]) == alone((8,), 3)
    assert ahead.session("a").plan_counters.reuses == 3


def test_a_flip_to_replan_waits_for_the_token() -> None:
    ahead = make()
    ahead.open("a")
    ahead.submit("a", (5, 6, 7), stopping={"max_tokens": 9})
    for plan in (DecodePlan.REPLAN, DecodePlan.PLAN_ONCE) * 2:
        ahead.round()
        ahead.table.handle(commands.UpdateSession("a", None, plan, {}))
    ahead.finish()
    plans = [event.plan for event in ahead.events["a"] if isinstance(event, TokenDrawn)]
    assert plans[:4] == [DecodePlan.PLAN_ONCE, DecodePlan.REPLAN] * 2
    assert told(ahead, "a") == alone((5, 6, 7), 9)


def test_a_preempted_token_keeps_its_class_while_it_is_unknown() -> None:
    """A turn of a higher priority takes the blocks between launch and read; all comes again as it was."""
    classes: dict[int, TokenClass] = {}
    positions: list[int] = []

    def watch(batch: Batch) -> None:
        for row in batch.rows:
            if row.session_id != "low":
                continue
            positions.append(row.position)
            for position in range(row.position, row.context_len):
                assert classes.setdefault(position, row.token_class) is row.token_class

    ahead = make(num_blocks=6, before_launch=watch)
    ahead.open("low")
    ahead.submit("low", (5,) * 6, stopping={"max_tokens": 12})
    for _ in range(4):
        ahead.round()
    ahead.open("high")
    ahead.submit("high", (7,) * 15, priority=1, stopping={"max_tokens": 4})
    ahead.round()
    session = ahead.session("low")
    # One token of the step was left, and it begins anew.
    assert (session.num_computed, len(session.block_table), session.num_tokens) == (1, 1, 10)
    assert ahead.view("low").num_computed == 0
    ahead.finish()
    assert positions.count(0) >= 2
    assert told(ahead, "low") == alone((5,) * 6, 12)
    assert told(ahead, "high") == alone((7,) * 15, 4)
    assert set(classes.values()) == set(TokenClass)


def test_a_turn_that_ends_when_read_is_no_victim() -> None:
    ahead = make(num_blocks=3)
    ahead.open("low")
    ahead.submit("low", (5,) * 7, stopping={"max_tokens": 1})
    ahead.round()
    ahead.open("high")
    ahead.submit("high", (7,) * 7, priority=1, stopping={"max_tokens": 2})
    ahead.finish()
    assert ahead.session("low").num_due == 7
    assert told(ahead, "low") == alone((5,) * 7, 1)
    assert told(ahead, "high") == alone((7,) * 7, 2)


def test_an_append_ends_when_its_last_chunk_is_read() -> None:
    ahead = make()
    ahead.open("a")
    ahead.submit("a", tuple(range(40)), appends_only=True)
    ahead.finish()
    assert [verb for verb, _ in ahead.device.log] == [*("launch", "launch", "read", "launch", "read", "read")]
    end = ahead.events["a"][-1]
    assert isinstance(end, Finished)
    assert (end.reason, ahead.view("a").num_computed) == (FinishReason.APPENDED, 40)


def test_time_of_a_step_starts_anew_with_each_that_is_read() -> None:
    ahead = make()
    ahead.open("a")
    ahead.submit("a", (5, 6, 7), stopping={"max_tokens": 3})
    assert ahead.pipeline.running_step_ns == 0
    ahead.round()
    ahead.now_ns += 700
    assert ahead.pipeline.running_step_ns == 700
    ahead.round()
    assert ahead.pipeline.running_step_ns == 0
    ahead.now_ns += 30
    assert ahead.pipeline.running_step_ns == 30
    ahead.finish()
    ahead.now_ns += 1000
    assert ahead.pipeline.running_step_ns == 0
    itl = [event.itl_ns for event in ahead.events["a"] if isinstance(event, TokenDrawn)]
    # A token's time is when the host knows it.
    assert itl[0] == 0
    assert itl[1] == 40


def test_stop_waits_for_what_is_in_flight() -> None:
    device = FakeDevice(64, 4)
    scheduler = PagedSessionScheduler(
        BlockPool(64), block_size=4, max_step_tokens=16, max_step_rows=4, max_context_tokens=256
    )
    engine = Engine(
        scheduler=scheduler,
        runner=cast("Any", device),
        tokenizer=cast("Any", FakeTokenizer()),
        max_replan_sessions=1,
    )
    num_launches = 0

    def stop_in_the_fifth(_: Batch) -> None:
        nonlocal num_launches
        num_launches += 1
        if num_launches == 5:
            engine._inbox.put(None)

    device.before_launch = stop_in_the_fifth
    engine.start(prepare=lambda: None, on_report=lambda _: None, on_error=lambda *_: None).result(10)
    engine.post(commands.OpenSession("a", None, None, SamplingChoice(), {})).result(10)
    base = engine.turn_base("a")
    engine.post(Ahead.command("a", (5,), base, stopping={"max_tokens": 30})).result(10)
    assert engine.ended.result(10) is None
    assert [verb for verb, _ in device.log[-2:]] == ["read", "read"]
    assert len(device.log) == 10
    assert not device.in_flight


def test_classes_of_a_log() -> None:
    session = Session("s", DecodePlan.PLAN_ONCE, 100)
    session.append_input((1, 2, 3))
    session.append_input(())
    session.append_drawn(4)
    session.append_drawn(5)
    session.append_input((6,))
    session.append_input((7,))
    found = [session.class_at(position)[0].name[0] for position in range(7)]
    assert "".join(found) == "PPPDDPP"
    assert [session.class_at(position)[1] for position in range(7)] == [3, 3, 3, 5, 5, 7, 7]
    session.cut_log(4)
    session.append_input((8,))
    assert [session.class_at(position)[0].name[0] for position in range(5)] == list("PPPDP")
    session.cut_log(0)
    assert session.class_borders == []


def test_the_fake_draws_what_is_allowed() -> None:
    assert draw_of(35, frozenset({7})) == 8
