"""The scheduler alone: rows, budget, and what a turn leaves of a log."""

import pytest

from tests.worker.scheduler_turns import BLOCK, Turns, small_scheduler
from worker.batch import Batch, DecodePlan, Row, TokenClass
from worker.errors import Refused
from worker.session import Session


def _whole(session: Session) -> tuple[object, ...]:
    return (
        list(session.token_ids),
        session.revision,
        session.num_computed,
        session.num_due,
        session.block_table,
    )


def test_a_turn_computes_only_what_is_new() -> None:
    turns = Turns(scheduler := small_scheduler())
    session = scheduler.open("s")
    turns.submit(session, tuple(range(6)), max_tokens=3)
    counts = []
    while session.generation:
        counts.append([len(row.token_ids) for row in turns.step().rows])
    assert counts == [[6], [1], [1]]
    second = turns.submit(session, (50, 51), max_tokens=1)
    (row,) = turns.step().rows
    # The last token of the first turn had no KV yet: it is computed together with the new input.
    assert (row.position, len(row.token_ids)) == (8, 3)
    assert (second.cached_tokens, second.reprefilled_tokens) == (8, 0)
    assert session.revision == 2


def test_a_long_input_is_cut_to_the_budget_and_does_not_stall_a_stream() -> None:
    turns = Turns(scheduler := small_scheduler(tokens=8))
    stream, long = scheduler.open("stream"), scheduler.open("long")
    turns.submit(stream, (1, 2), max_tokens=8)
    turns.step()
    turns.submit(long, tuple(range(20)), max_tokens=1)
    shares = []
    while long.generation:
        shares.append({row.session_id: len(row.token_ids) for row in turns.step().rows})
    assert shares == [{"stream": 1, "long": 7}, {"stream": 1, "long": 7}, {"stream": 1, "long": 6}]


def test_rows_are_bounded() -> None:
    turns = Turns(scheduler := small_scheduler(rows=2))
    for n in range(5):
        turns.submit(scheduler.open(str(n)), (1,), max_tokens=2)
    seen = 0
    while scheduler.has_work:
        batch = turns.step()
        assert 1 <= len(batch.rows) <= 2
        seen += len(batch.rows)
    assert seen == 10


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_s12_blocks_cover_the_log_at_every_border(length: int) -> None:
    turns = Turns(scheduler := small_scheduler())
    session = scheduler.open("s")
    turns.submit(session, tuple(range(length)), max_tokens=BLOCK + 1)
    while session.generation:
        (row,) = turns.step().rows
        assert len(row.block_table) == -(-row.context_len // BLOCK)
    assert session.num_computed == session.num_tokens - 1 == length + BLOCK


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
@pytest.mark.parametrize("ids", [tuple(range(30)), ()])
def test_s03_a_rolled_back_turn_leaves_no_trace(
    max_tokens: int, num_steps: int, ids: tuple[int, ...]
) -> None:
    """S3, S5: after a turn or an append, at whatever step of the next one, with input or without."""
    turns = Turns(scheduler := small_scheduler())
    session = scheduler.open("s")
    turns.submit(session, tuple(range(7)), max_tokens)
    turns.run(session)
    before = _whole(session)
    turns.submit(session, ids, max_tokens=9)
    for _ in range(num_steps):
        turns.step()
    scheduler.finish(session, keep=False)
    assert _whole(session) == before
    assert scheduler.pool.num_free + len(session.block_table) == scheduler.pool.num_blocks
    again = turns.submit(session, (1,), max_tokens=1)
    turns.step()
    assert (again.cached_tokens, again.reprefilled_tokens) == (session.num_tokens - 2 - (max_tokens > 0), 0)


def test_a_turn_without_input_computes_the_last_token() -> None:
    """S13: there is always at least one token to compute, and its logits are those of the whole log."""
    turns = Turns(scheduler := small_scheduler())
    session = scheduler.open("s")
    for max_tokens in (1, 0):  # after a drawn token, that has no KV yet, and after an append, where all have
        turns.submit(session, (1, 2, 3), max_tokens)
        turns.run(session)
        length = session.num_tokens
        following = turns.submit(session, (), max_tokens=1)
        (row,) = turns.step().rows
        assert (row.position, len(row.token_ids), row.wants_logits) == (length - 1, 1, True)
        assert (following.cached_tokens, following.reprefilled_tokens) == (length - 1, 0)


def test_an_append_computes_all_of_its_input_and_draws_nothing() -> None:
    turns = Turns(scheduler := small_scheduler(tokens=8))
    session = scheduler.open("s")
    turns.submit(session, tuple(range(12)), max_tokens=0)
    assert not scheduler.is_appended(session)
    batches = []
    while session.generation:
        batches.append(turns.step())
    assert [(row.wants_logits, len(row.token_ids)) for batch in batches for row in batch.rows] == [
        (False, 8),
        (False, 4),
    ]
    assert (session.num_computed, session.num_tokens, session.revision) == (12, 12, 1)
    following = turns.submit(session, (1,), max_tokens=1)
    turns.step()
    assert following.cached_tokens == 12


def test_a_turn_cut_in_its_input_leaves_nothing_to_compute_again() -> None:
    """What never had KV was not reclaimed, though it is computed by the next turn."""
    turns = Turns(scheduler := small_scheduler(tokens=8))
    session = scheduler.open("s")
    turns.submit(session, tuple(range(20)))
    turns.step()
    scheduler.finish(session, keep=True)
    following = turns.submit(session, (1,), max_tokens=1)
    turns.step()
    assert (following.cached_tokens, following.reprefilled_tokens) == (8, 0)


def test_a_row_that_failed_stays_where_it_was() -> None:
    scheduler = small_scheduler()
    good, bad = scheduler.open("good"), scheduler.open("bad")
    turns = Turns(scheduler)
    for session in (bad, good):
        turns.submit(session, (1, 2, 3))
    for row, token_id in zip(scheduler.schedule().rows, (None, 7), strict=True):
        scheduler.commit(row, token_id)
    assert (bad.num_computed, bad.num_tokens) == (0, 3)
    assert (good.num_computed, good.token_ids) == (3, [1, 2, 3, 7])


def test_rows_share_a_table_until_it_changes() -> None:
    turns = Turns(scheduler := small_scheduler())
    session = scheduler.open("s")
    turns.submit(session, (1,), max_tokens=2 * BLOCK)
    tables = [turns.step().rows[0].block_table for _ in range(2 * BLOCK)]
    assert [len(table) for table in tables] == [1] * BLOCK + [2] * BLOCK
    assert len({id(table) for table in tables}) == 2


def test_a_token_that_no_row_wanted_is_refused() -> None:
    turns = Turns(scheduler := small_scheduler())
    session = scheduler.open("s")
    turns.submit(session, (1, 2, 3), max_tokens=0)
    (row,) = scheduler.schedule().rows
    with pytest.raises(ValueError, match="token_id 7 for a row of s that wants no logits"):
        scheduler.commit(row, 7)
    assert (session.num_computed, session.token_ids) == (0, [1, 2, 3])


@pytest.mark.parametrize(
    ("prepare", "ids", "max_tokens", "reason"),
    [
        ("empty", (), 4, "FIELD_REQUIRED"),
        ("appended", (), 0, "FIELD_REQUIRED"),
        ("empty", tuple(range(16)), 4, "PROMPT_TOO_LONG"),
        ("appended", tuple(range(14)), 0, "PROMPT_TOO_LONG"),
        ("busy", (1,), 4, "SESSION_BUSY"),
    ],
)
def test_refused_turns_change_nothing(
    prepare: str, ids: tuple[int, ...], max_tokens: int, reason: str
) -> None:
    """S4, S24-S26: a turn beside a running one, without input, or over the context."""
    turns = Turns(scheduler := small_scheduler(context=16))
    session = scheduler.open("s")
    if prepare != "empty":
        turns.submit(session, (1, 2), max_tokens=4 if prepare == "busy" else 0)
        turns.step()
    before = _whole(session)
    with pytest.raises(Refused) as caught:
        turns.submit(session, ids, max_tokens)
    assert caught.value.reason == reason
    assert _whole(session) == before
    assert scheduler.has_work == (prepare == "busy")


def test_the_context_is_capped_by_what_the_pool_can_hold() -> None:
    scheduler = small_scheduler(num_blocks=3, context=1000)
    assert scheduler.open("s").max_context_tokens == 3 * BLOCK
    assert scheduler.open("t", max_context_tokens=5).max_context_tokens == 5


def test_closing_frees_everything_and_a_name_is_free_again() -> None:
    turns = Turns(scheduler := small_scheduler())
    session = scheduler.open("s", priority=3)
    assert session.priority == 3
    turns.submit(session, (1, 2, 3), max_tokens=1)
    with pytest.raises(ValueError, match="running turn"):
        scheduler.close(session)
    turns.step()
    with pytest.raises(ValueError, match="no running turn"):
        scheduler.finish(session, keep=True)
    scheduler.close(session)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert scheduler.open("s", plan=DecodePlan.REPLAN).plan is DecodePlan.REPLAN
    with pytest.raises(Refused, match="SESSION_EXISTS"):
        scheduler.open("s")


def test_s06_the_pool_is_exact_after_ten_thousand_sessions() -> None:
    turns = Turns(scheduler := small_scheduler(num_blocks=5))
    for n in range(10_000):
        session = scheduler.open(f"{n % 7}")
        turns.submit(session, (n,) * (n % 5 + 1))
        for _ in range(n % 3):
            turns.step()
        scheduler.finish(session, keep=n % 2 == 0)
        scheduler.close(session)
    assert scheduler.pool.num_free == 5


def test_a_row_ends_where_the_class_changes_and_the_rest_comes_in_the_next_step() -> None:
    scheduler = small_scheduler(tokens=8)
    scheduler.has_token_classes = True
    turns = Turns(scheduler)
    session = scheduler.open("s")
    seen: list[tuple[int, int, TokenClass, bool]] = []

    def run() -> None:
        while session.generation:
            (row,) = turns.step().rows
            seen.append((row.position, len(row.token_ids), row.token_class, row.wants_logits))

    turns.submit(session, tuple(range(10)), max_tokens=3)
    run()
    turns.submit(session, (50, 51), max_tokens=1)
    run()
    prefill, decode = TokenClass.PREFILL, TokenClass.DECODE
    assert seen == [
        *((0, 8, prefill, False), (8, 2, prefill, True), (10, 1, decode, True), (11, 1, decode, True)),
        *((12, 1, decode, False), (13, 2, prefill, True)),
    ]
    # All of it is taken, and computed again as what it was.
    scheduler._cut(session, 0)
    seen.clear()
    turns.submit(session, (), max_tokens=1)
    run()
    assert seen == [
        *((0, 8, prefill, False), (8, 2, prefill, False), (10, 3, decode, False)),
        *((13, 2, prefill, False), (15, 1, decode, True)),
    ]


def test_a_log_that_was_appended_whole_has_its_last_token_computed_again_as_input() -> None:
    scheduler = small_scheduler()
    scheduler.has_token_classes = True
    turns = Turns(scheduler)
    session = scheduler.open("s")
    turns.submit(session, tuple(range(5)), max_tokens=0)
    turns.run(session)
    turns.submit(session, (), max_tokens=1)
    (row,) = turns.step().rows
    assert (row.position, row.token_class) == (4, TokenClass.PREFILL)


def test_a_batch_is_cut_by_mode_and_class() -> None:
    once, replan = DecodePlan.PLAN_ONCE, DecodePlan.REPLAN
    kinds = [
        *((replan, TokenClass.PREFILL), (once, TokenClass.PREFILL), (once, TokenClass.DECODE)),
        *((replan, TokenClass.DECODE), (once, TokenClass.PREFILL)),
    ]
    rows = [
        Row(str(number), (1,), 0, (0,), wants_logits=True, plan=plan, token_class=token_class)
        for number, (plan, token_class) in enumerate(kinds)
    ]
    assert [[row.session_id for row in turn.rows] for turn in Batch(tuple(rows)).turns()] == [
        *(["2"], ["1", "4"], ["3"], ["0"])
    ]
    one = Batch((rows[1], rows[4]))
    assert one.turns() == (one,)
    assert Batch(()).turns() == ()
