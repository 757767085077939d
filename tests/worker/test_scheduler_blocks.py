"""The scheduler alone: the order of turns, and who gives up blocks for whom."""

import pytest

from tests.worker.scheduler_turns import BLOCK, Turns, small_scheduler
from worker.errors import OutOfBlocks


def test_s14_a_small_pool_gives_the_tokens_of_a_big_one() -> None:
    """Preempted turns, and idle sessions whose KV was taken, go on as if nothing had happened."""

    def logs(num_blocks: int) -> tuple[list[list[int]], int]:
        turns = Turns(scheduler := small_scheduler(num_blocks))
        sessions = [scheduler.open(str(n)) for n in range(6)]
        recomputed = 0
        for turn in range(3):
            started = [
                turns.submit(session, (n, turn, n + turn), max_tokens=5 + n)
                for n, session in enumerate(sessions)
            ]
            while scheduler.has_work:
                assert turns.step().rows
            recomputed += sum(generation.reprefilled_tokens for generation in started)
        return [session.token_ids for session in sessions], recomputed

    small, recomputed = logs(10)
    big, nothing = logs(200)
    assert small == big
    assert recomputed > 0
    assert nothing == 0


def test_a_waiting_turn_does_not_wait_for_later_ones() -> None:
    """However many small turns come after it, it runs as soon as the blocks of earlier ones are free."""
    turns = Turns(scheduler := small_scheduler(num_blocks=4, tokens=64))
    first, waiting = scheduler.open("first"), scheduler.open("waiting")
    turns.submit(first, tuple(range(7)), max_tokens=5)
    turns.step()
    turns.submit(waiting, tuple(range(10)), max_tokens=1)
    ran_beside = 0
    while first.generation:
        turns.submit(scheduler.open(f"late {ran_beside}"), (1,), max_tokens=50)
        assert waiting.generation
        ran_beside += len(turns.step().rows) - 1
    assert ran_beside > 0
    turns.step()
    assert waiting.revision == 1


def test_the_first_turn_takes_the_blocks_of_later_ones_and_not_the_other_way_round() -> None:
    turns = Turns(scheduler := small_scheduler(num_blocks=6, tokens=8))
    long, stream = scheduler.open("long"), scheduler.open("stream")
    turns.submit(long, tuple(range(20)), max_tokens=1)
    turns.step()
    turns.submit(stream, (1,), max_tokens=9)
    computed = []
    while scheduler.has_work:
        assert all(len(row.block_table) * BLOCK >= row.context_len for row in turns.step().rows)
        computed.append(long.num_computed)
    assert computed[:2] == [15, 20]
    assert (long.revision, stream.revision) == (1, 1)


def test_the_session_that_was_idle_longest_is_dropped_first() -> None:
    turns = Turns(scheduler := small_scheduler(num_blocks=6))
    new, old, following = [scheduler.open(name) for name in ("new", "old", "next")]
    for session in (old, new):
        turns.submit(session, tuple(range(7)), max_tokens=1)
        turns.step()
    turns.submit(following, tuple(range(12)), max_tokens=1)
    turns.step()
    assert (old.num_computed, new.num_computed, following.num_computed) == (0, 7, 12)
    again = turns.submit(old, (1,), max_tokens=1)
    turns.run(old)
    assert (again.cached_tokens, again.reprefilled_tokens) == (0, 7)


def test_tokens_are_kept_for_streams_that_have_a_row_and_no_others() -> None:
    scheduler = small_scheduler(tokens=16, rows=4)
    turns = Turns(scheduler)
    long = scheduler.open("long", priority=1)
    for number in range(40):
        turns.submit(scheduler.open(f"stream-{number}"), (1,), max_tokens=9)
    turns.submit(long, tuple(range(30)), max_tokens=1, priority=1)
    shares = [len(turns.step().rows[0].token_ids) for _ in range(3)]
    assert shares == [13, 13, 4]


def test_an_input_advances_beside_any_number_of_streams() -> None:
    turns = Turns(scheduler := small_scheduler(tokens=4, rows=4))
    waiting = scheduler.open("waiting")
    turns.submit(waiting, tuple(range(9)), max_tokens=1)
    for n in range(6):
        turns.submit(scheduler.open(str(n)), (1,), max_tokens=40)
    steps = 0
    while waiting.generation:
        turns.step()
        steps += 1
    assert steps <= 9


def test_higher_priority_comes_first_and_takes_blocks_of_lower() -> None:
    turns = Turns(scheduler := small_scheduler(num_blocks=4, rows=1))
    low, high = scheduler.open("low"), scheduler.open("high")
    turns.submit(low, tuple(range(9)), max_tokens=3)
    turns.step()
    urgent = turns.submit(high, tuple(range(7)), max_tokens=3, priority=1)
    assert scheduler.first_turn() is high
    assert [row.session_id for row in turns.step().rows] == ["high"]
    assert low.block_table == ()
    scheduler.prioritise(urgent, -1)
    assert scheduler.first_turn() is low
    assert [row.session_id for row in turns.step().rows] == ["low"]
    while scheduler.has_work:
        turns.step()
    assert scheduler.first_turn() is None
    assert (low.num_generated, low.revision, high.revision) == (0, 1, 1)


def test_equal_priorities_come_in_the_order_of_arrival() -> None:
    turns = Turns(scheduler := small_scheduler())
    for name, priority in (("c", -1), ("a", 2), ("d", -1), ("b", 2)):
        turns.submit(scheduler.open(name), (1,), priority=priority)
    assert [row.session_id for row in turns.step().rows] == ["a", "b", "c", "d"]


def test_a_shared_block_is_not_written_but_computed_again() -> None:
    """A full block that another holder reads too stays as it is; its last token's row gets its own."""
    turns = Turns(scheduler := small_scheduler())
    session = scheduler.open("s")
    turns.submit(session, tuple(range(2 * BLOCK)), max_tokens=0)
    turns.run(session)
    shared = list(session.block_table)
    scheduler.pool.share(shared)
    following = turns.submit(session, (), max_tokens=1)
    batch = scheduler.schedule()
    (row,) = batch.rows
    assert (row.position, len(row.token_ids), row.block_table[0]) == (BLOCK, BLOCK, shared[0])
    assert row.block_table[1] not in shared
    assert [scheduler.pool.num_holders(block) for block in (*shared, row.block_table[1])] == [2, 1, 1]
    assert (following.cached_tokens, following.reprefilled_tokens) == (BLOCK, BLOCK - 1)


def test_only_what_nobody_else_holds_is_reclaimed() -> None:
    """A session whose blocks are all shared is left alone, and one that has nothing for it fails alone."""
    turns = Turns(scheduler := small_scheduler(num_blocks=4, context=16))
    idle, wanting = scheduler.open("idle"), scheduler.open("wanting")
    turns.submit(idle, tuple(range(2 * BLOCK)), max_tokens=0)
    turns.run(idle)
    shared = list(idle.block_table)
    scheduler.pool.share(shared)
    turns.submit(wanting, tuple(range(3 * BLOCK)), max_tokens=1)
    assert scheduler.schedule().rows == ()
    assert scheduler.first_turn() is wanting
    assert (idle.num_computed, wanting.block_table, scheduler.pool.num_free) == (2 * BLOCK, (), 2)
    assert scheduler.pool.release(shared) == ()
    turns.run(wanting)
    assert (idle.num_computed, wanting.revision) == (0, 1)


def test_blocks_that_victims_share_among_themselves_are_reclaimed() -> None:
    turns = Turns(scheduler := small_scheduler(num_blocks=4))
    one, two, wanting = [scheduler.open(name) for name in ("one", "two", "wanting")]
    turns.submit(one, tuple(range(3 * BLOCK)), max_tokens=0)
    turns.run(one)
    scheduler.pool.share(one.block_table)
    two.token_ids, two.block_table = list(one.token_ids), one.block_table
    two.num_computed = two.num_due = one.num_computed
    turns.submit(wanting, tuple(range(2 * BLOCK)), max_tokens=1)
    (row,) = scheduler.schedule().rows
    assert len(row.block_table) == 2
    assert (one.block_table, two.block_table, scheduler.pool.num_free) == ((), (), 2)


def test_a_failed_turn_gives_up_the_kv_of_its_session_alone() -> None:
    """S17: and tells which blocks nobody holds any more, so that they can be emptied."""
    turns = Turns(scheduler := small_scheduler())
    session, other = scheduler.open("s"), scheduler.open("other")
    turns.submit(session, tuple(range(2 * BLOCK)), max_tokens=1)
    turns.run(session)
    scheduler.pool.share(session.block_table[:1])
    log, shared = list(session.token_ids), session.block_table[0]
    turns.submit(other, (1, 2), max_tokens=9)
    turns.submit(session, (5, 6, 7), max_tokens=9)
    turns.step()
    table = list(session.block_table)
    assert scheduler.fail(session) == tuple(table[1:])
    assert (session.token_ids, session.revision, session.num_computed) == (log, 1, 0)
    assert (scheduler.pool.num_holders(shared), other.num_computed) == (1, 2)
    with pytest.raises(ValueError, match="no running turn"):
        scheduler.fail(session)
    assert scheduler.pool.release([shared]) == (shared,)
    again = turns.submit(session, (5,), max_tokens=1)
    turns.run(session)
    assert (again.cached_tokens, again.reprefilled_tokens) == (0, 2 * BLOCK)


def test_an_allocation_that_fails_leaves_one_turn_out_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(scheduler := small_scheduler())
    first, second = scheduler.open("first"), scheduler.open("second")
    for session in (first, second):
        turns.submit(session, (1, 2, 3), max_tokens=1)
    calls = []

    def fail_once(count: int) -> list[int]:
        calls.append(count)
        if len(calls) == 1:
            raise OutOfBlocks(wanted=count, free=0)
        return type(scheduler.pool).allocate(scheduler.pool, count)

    monkeypatch.setattr(scheduler.pool, "allocate", fail_once)
    assert [row.session_id for row in turns.step().rows] == ["second"]
    assert (first.block_table, first.num_computed) == ((), 0)
    assert [row.session_id for row in turns.step().rows] == ["first"]
