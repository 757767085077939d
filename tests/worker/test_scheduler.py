"""The scheduler alone: a fake model whose next token is a function of the whole log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.batch import Batch, DecodePlan
from worker.errors import Refused
from worker.kv.block_pool import BlockPool
from worker.scheduler import PagedSessionScheduler
from worker.session import Generation, Sampling, Session

BLOCK = 4


def _scheduler(num_blocks: int = 64, **limits: int) -> PagedSessionScheduler:
    return PagedSessionScheduler(
        BlockPool(num_blocks),
        block_size=BLOCK,
        max_step_tokens=limits.get("tokens", 16),
        max_step_rows=limits.get("rows", 8),
        max_context_tokens=limits.get("context", 1024),
    )


def _turn(ids: tuple[int, ...], max_tokens: int = 4, name: str = "g") -> Generation:
    return Generation(name, ids, Sampling(0.0, 0), max_tokens, frozenset())


def _next_token(log: list[int]) -> int:
    return hash(tuple(log)) % 1000


def _run_step(scheduler: PagedSessionScheduler, sessions: list[Session]) -> Batch:
    """One step; every block table is checked for overlaps, then turns that are done are committed."""
    batch = scheduler.schedule()
    by_id = {session.session_id: session for session in sessions}
    held = [block for session in sessions for block in session.block_table]
    assert len(set(held)) == len(held)
    assert len(held) + scheduler.pool.num_free == scheduler.pool.num_blocks
    scheduler.commit(
        batch, [_next_token(by_id[row.session_id].token_ids) for row in batch.rows if row.wants_logits]
    )
    for session in sessions:
        if session.generation and session.num_generated == session.generation.max_tokens:
            scheduler.finish(session, keep=True)
    return batch


def test_a_turn_computes_only_what_is_new() -> None:
    scheduler = _scheduler()
    session = scheduler.open("s")
    scheduler.submit(session, _turn(tuple(range(6)), max_tokens=3))
    counts = []
    while session.generation:
        counts.append([len(row.token_ids) for row in _run_step(scheduler, [session]).rows])
    assert counts == [[6], [1], [1]]
    second = _turn((50, 51), max_tokens=1)
    scheduler.submit(session, second)
    (row,) = _run_step(scheduler, [session]).rows
    # The last token of the first turn had no KV yet: it is computed together with the new input.
    assert (row.position, len(row.token_ids)) == (8, 3)
    assert (second.cached_tokens, second.reprefilled_tokens) == (8, 0)
    assert session.revision == 2


def test_a_long_input_is_cut_to_the_budget_and_does_not_stall_a_stream() -> None:
    scheduler = _scheduler(tokens=8)
    stream, long = scheduler.open("stream"), scheduler.open("long")
    scheduler.submit(stream, _turn((1, 2), max_tokens=8))
    _run_step(scheduler, [stream, long])
    scheduler.submit(long, _turn(tuple(range(20)), max_tokens=1))
    shares = []
    while long.generation:
        batch = _run_step(scheduler, [stream, long])
        shares.append({row.session_id: len(row.token_ids) for row in batch.rows})
    assert shares == [{"stream": 1, "long": 7}, {"stream": 1, "long": 7}, {"stream": 1, "long": 6}]


def test_rows_are_bounded() -> None:
    scheduler = _scheduler(rows=2)
    sessions = [scheduler.open(str(n)) for n in range(5)]
    for session in sessions:
        scheduler.submit(session, _turn((1,), max_tokens=2))
    seen = 0
    while scheduler.has_work:
        batch = _run_step(scheduler, sessions)
        assert 1 <= len(batch.rows) <= 2
        seen += len(batch.rows)
    assert seen == 10


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_s12_blocks_cover_the_log_at_every_border(length: int) -> None:
    scheduler = _scheduler()
    session = scheduler.open("s")
    scheduler.submit(session, _turn(tuple(range(length)), max_tokens=BLOCK + 1))
    while session.generation:
        (row,) = _run_step(scheduler, [session]).rows
        assert len(row.block_table) == -(-row.context_len // BLOCK)
    assert session.num_computed == session.num_tokens - 1 == length + BLOCK


def test_a_small_pool_gives_the_tokens_of_a_big_one() -> None:
    """S14: preempted turns, and idle sessions whose KV was taken, go on as if nothing had happened."""

    def logs(num_blocks: int) -> tuple[list[list[int]], int]:
        scheduler = _scheduler(num_blocks)
        sessions = [scheduler.open(str(n)) for n in range(6)]
        recomputed = 0
        for turn in range(3):
            for n, session in enumerate(sessions):
                scheduler.submit(session, _turn((n, turn, n + turn), max_tokens=5 + n))
            started = [session.generation for session in sessions]
            while scheduler.has_work:
                assert _run_step(scheduler, sessions).rows
            recomputed += sum(generation.reprefilled_tokens for generation in started if generation)
        return [session.token_ids for session in sessions], recomputed

    small, recomputed = logs(10)
    big, nothing = logs(200)
    assert small == big
    assert recomputed > 0
    assert nothing == 0


def test_s03_a_rolled_back_turn_leaves_no_trace() -> None:
    scheduler = _scheduler()
    session = scheduler.open("s")
    scheduler.submit(session, _turn(tuple(range(7)), max_tokens=3))
    while session.generation:
        _run_step(scheduler, [session])
    before = (list(session.token_ids), session.revision, session.num_computed, len(session.block_table))
    scheduler.submit(session, _turn(tuple(range(30)), max_tokens=9))
    for _ in range(4):
        _run_step(scheduler, [session])
    scheduler.finish(session, keep=False)
    assert (
        list(session.token_ids),
        session.revision,
        session.num_computed,
        len(session.block_table),
    ) == before
    assert scheduler.pool.num_free + len(session.block_table) == scheduler.pool.num_blocks
    again = _turn((1,), max_tokens=1)
    scheduler.submit(session, again)
    _run_step(scheduler, [session])
    assert again.cached_tokens == before[2]


def test_continuing_after_a_rollback_recomputes_the_last_token() -> None:
    """S13: there is always at least one token to compute."""
    scheduler = _scheduler()
    session = scheduler.open("s")
    scheduler.submit(session, _turn((1, 2, 3), max_tokens=1))
    _run_step(scheduler, [session])
    scheduler.submit(session, _turn((), max_tokens=1))
    (row,) = _run_step(scheduler, [session]).rows
    assert len(row.token_ids) == 1
    assert row.wants_logits


def test_a_waiting_turn_does_not_wait_for_later_ones() -> None:
    """However many small turns come after it, it runs as soon as the blocks of earlier ones are free."""
    scheduler = _scheduler(num_blocks=4, tokens=64)
    first, waiting = scheduler.open("first"), scheduler.open("waiting")
    sessions = [first, waiting]
    scheduler.submit(first, _turn(tuple(range(7)), max_tokens=5))
    _run_step(scheduler, sessions)
    scheduler.submit(waiting, _turn(tuple(range(10)), max_tokens=1))
    ran_beside = 0
    while first.generation:
        late = scheduler.open(f"late {len(sessions)}")
        sessions.append(late)
        scheduler.submit(late, _turn((1,), max_tokens=50))
        assert waiting.generation
        ran_beside += len(_run_step(scheduler, sessions).rows) - 1
    assert ran_beside > 0
    _run_step(scheduler, sessions)
    assert waiting.revision == 1


def test_the_first_turn_takes_the_blocks_of_later_ones_and_not_the_other_way_round() -> None:
    scheduler = _scheduler(num_blocks=6, tokens=8)
    long, stream = scheduler.open("long"), scheduler.open("stream")
    scheduler.submit(long, _turn(tuple(range(20)), max_tokens=1))
    _run_step(scheduler, [long, stream])
    scheduler.submit(stream, _turn((1,), max_tokens=9))
    computed = []
    while scheduler.has_work:
        batch = _run_step(scheduler, [long, stream])
        assert all(len(row.block_table) * BLOCK >= row.context_len for row in batch.rows)
        computed.append(long.num_computed)
    assert computed[:2] == [15, 20]
    assert (long.revision, stream.revision) == (1, 1)


def test_the_session_that_was_idle_longest_is_dropped_first() -> None:
    scheduler = _scheduler(num_blocks=6)
    sessions = [scheduler.open(name) for name in ("new", "old", "next")]
    new, old, following = sessions
    for session in (old, new):
        scheduler.submit(session, _turn(tuple(range(7)), max_tokens=1))
        _run_step(scheduler, sessions)
    scheduler.submit(following, _turn(tuple(range(12)), max_tokens=1))
    _run_step(scheduler, sessions)
    assert (old.num_computed, new.num_computed, following.num_computed) == (0, 7, 12)


def test_an_input_advances_beside_any_number_of_streams() -> None:
    scheduler = _scheduler(tokens=4, rows=4)
    waiting = scheduler.open("waiting")
    streams = [scheduler.open(str(n)) for n in range(6)]
    scheduler.submit(waiting, _turn(tuple(range(9)), max_tokens=1))
    for stream in streams:
        scheduler.submit(stream, _turn((1,), max_tokens=40))
    steps = 0
    while waiting.generation:
        _run_step(scheduler, [waiting, *streams])
        steps += 1
    assert steps <= 9


@pytest.mark.parametrize(
    ("prepare", "ids", "reason"),
    [
        ("empty", (), "FIELD_REQUIRED"),
        ("empty", tuple(range(16)), "PROMPT_TOO_LONG"),
        ("busy", (1,), "SESSION_BUSY"),
    ],
)
def test_refused_turns_change_nothing(prepare: str, ids: tuple[int, ...], reason: str) -> None:
    scheduler = _scheduler(context=16)
    session = scheduler.open("s")
    if prepare == "busy":
        scheduler.submit(session, _turn((1, 2)))
    log = list(session.token_ids)
    with pytest.raises(Refused) as caught:
        scheduler.submit(session, _turn(ids))
    assert caught.value.reason == reason
    assert session.token_ids == log


def test_the_context_is_capped_by_what_the_pool_can_hold() -> None:
    scheduler = _scheduler(num_blocks=3, context=1000)
    assert scheduler.open("s").max_context_tokens == 3 * BLOCK
    assert scheduler.open("t", max_context_tokens=5).max_context_tokens == 5


def test_closing_frees_everything_and_a_name_is_free_again() -> None:
    scheduler = _scheduler()
    session = scheduler.open("s")
    scheduler.submit(session, _turn((1, 2, 3), max_tokens=1))
    with pytest.raises(ValueError, match="running turn"):
        scheduler.close(session)
    _run_step(scheduler, [session])
    scheduler.close(session)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert scheduler.open("s", plan=DecodePlan.REPLAN).plan is DecodePlan.REPLAN
    with pytest.raises(Refused, match="SESSION_EXISTS"):
        scheduler.open("s")


@given(data=st.data(), num_blocks=st.integers(3, 9), tokens=st.integers(2, 12))
def test_every_turn_ends_and_its_log_is_that_of_a_big_pool(
    data: st.DataObject, num_blocks: int, tokens: int
) -> None:
    """Turns of any length, one token and none included, come at any time; the first never waits."""
    plans = data.draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 14), st.integers(1, 6), st.integers(0, 5)),
            max_size=12,
        )
    )

    def logs(blocks: int) -> list[list[int]]:
        scheduler = _scheduler(blocks, tokens=tokens, rows=2, context=num_blocks * BLOCK)
        sessions = [scheduler.open(str(n)) for n in range(3)]
        for which, length, max_tokens, steps in plans:
            session = sessions[which]
            for _ in range(200):
                if session.generation is None:
                    break
                assert _run_step(scheduler, sessions).rows
            ids = tuple(range(length))
            fits = session.num_tokens + length + max_tokens <= session.max_context_tokens
            if fits and (ids or session.token_ids):
                scheduler.submit(session, _turn(ids, max_tokens=max_tokens))
            for _ in range(steps):
                if scheduler.has_work:
                    assert _run_step(scheduler, sessions).rows
        for _ in range(2000):
            if not scheduler.has_work:
                break
            assert _run_step(scheduler, sessions).rows
        assert not scheduler.has_work
        return [session.token_ids for session in sessions]

    assert logs(num_blocks) == logs(100)
