"""Thousands of seeds through the simulator, and the simulator itself: planted faults have to be found."""

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tests.worker import simulator
from tests.worker.simulator import simulate
from tests.worker.simulator_model import Violation
from tests.worker.simulator_world import Kinds
from worker.batch import Batch, Row
from worker.kv.block_pool import BlockPool
from worker.scheduler import PagedSessionScheduler
from worker.session import Generation, Session

NUM_SEEDS = 3_500
MAX_SEEDS_TO_FIND = 1_000
# What has to have happened for the checks to mean something.
EVENTS = {
    *("appends", "cached", "closed", "computed again", "continues", "exhausted", "failed"),
    *("failed allocations", "forks", "kept", "preempted", "reclaimed", "refused", "refused blocks"),
    *("rolled back", "lent", "turns", "unshared", "mixed steps"),
}


def test_every_promise_holds_for_3500_seeds() -> None:
    """S4, S6, S14: whatever happens, all logs are those of sessions run alone and the pool is exact."""
    total: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        total += simulate(seed)
    assert min(total[event] for event in EVENTS) >= NUM_SEEDS // 100


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_promise_holds_for_a_million_steps() -> None:
    num_steps = 0
    for seed in itertools.count(NUM_SEEDS):
        num_steps += simulate(seed)["steps"]
        if num_steps >= 1_000_000:
            break


def test_any_one_allocation_may_fail() -> None:
    tried = 0
    for seed in range(40):
        counts = simulate(seed, steps=20, fail_rate=0)
        for number in range(1, counts["allocations"] + 1):
            counts = simulate(seed, steps=20, fail_rate=0, failing_allocation=number)
            assert counts["failed allocations"] == 1
            tried += 1
    assert tried > 200


def test_a_seed_replays_exactly() -> None:
    def batches(seed: int) -> list[Batch]:
        seen: list[Batch] = []

        class Recorded(PagedSessionScheduler):
            def schedule(self) -> Batch:
                seen.append(batch := super().schedule())
                return batch

        simulate(seed, kinds=Kinds(scheduler=Recorded))
        return seen

    assert batches(5) == batches(5) != batches(6)


class ReleaseForgetsOne(BlockPool):
    def release(self, blocks: Iterable[int]) -> tuple[int, ...]:
        return super().release(list(blocks)[:3])


class ReleaseFreesWhatOneOtherHolds(BlockPool):
    def release(self, blocks: Iterable[int]) -> tuple[int, ...]:
        named = list(blocks)
        freed = super().release(named)
        early = tuple(block for block in named if self._num_holders[block] == 1)
        self._free.extend(early)
        return freed + early


class ShareCountsTwice(BlockPool):
    def share(self, blocks: Iterable[int]) -> None:
        named = list(blocks)
        super().share(named)
        super().share(named[-1:])


class ShareForgetsOne(BlockPool):
    def share(self, blocks: Iterable[int]) -> None:
        super().share(list(blocks)[:-1])


class AllocateLeavesOneFree(BlockPool):
    def allocate(self, count: int) -> list[int]:
        blocks = super().allocate(count)
        if count > 2:
            self._free.append(blocks[-1])
        return blocks


class AllocateCountsTwice(BlockPool):
    def allocate(self, count: int) -> list[int]:
        blocks = super().allocate(count)
        self._num_holders[blocks[-1]] = 2
        return blocks


class VictimsKeepTheirNumber(PagedSessionScheduler):
    def _cut(self, session: Session, num_blocks: int) -> tuple[int, ...]:
        num_computed = session.num_computed
        freed = super()._cut(session, num_blocks)
        session.num_computed = num_computed
        return freed


class CommitCountsOneTooMany(PagedSessionScheduler):
    def commit(self, row: Row, token_id: int | None) -> None:
        super().commit(row, token_id)
        if row.position:
            self._sessions[row.session_id].num_computed += 1


class CommitMovesFailedRows(PagedSessionScheduler):
    def commit(self, row: Row, token_id: int | None) -> None:
        super().commit(row, 0 if token_id is None and row.wants_logits else token_id)


class RollBackLeavesAToken(PagedSessionScheduler):
    def finish(self, session: Session, *, keep: bool) -> None:
        turn = session.generation
        assert turn is not None
        token_ids = session.token_ids[turn.log_start : turn.log_start + 1]
        super().finish(session, keep=keep)
        if not keep:
            session.token_ids.extend(token_ids)


class RollBackKeepsItsKv(PagedSessionScheduler):
    def finish(self, session: Session, *, keep: bool) -> None:
        num_computed = session.num_computed
        super().finish(session, keep=keep)
        session.num_computed = min(num_computed, session.num_tokens)


class FailedKvIsKept(PagedSessionScheduler):
    def fail(self, session: Session) -> tuple[int, ...]:
        self.finish(session, keep=False)
        return ()


class SharedBlocksAreWritten(PagedSessionScheduler):
    def _num_usable(self, session: Session) -> int:
        return len(session.block_table)


class SharedBlocksCountAsReclaimable(PagedSessionScheduler):
    def _reclaim(self, generation: Generation, wanted: int) -> bool:
        victims = self._victims(generation)
        if sum(len(victim.block_table) for victim in victims) < wanted:
            return False
        for victim in victims:
            self._cut(victim, 0)
        return True


class IdleSessionsArePinned(PagedSessionScheduler):
    def _victims(self, generation: Generation) -> list[Session]:
        return [other for other in super()._victims(generation) if other.generation is not None]


class RecentlyUsedGoFirst(PagedSessionScheduler):
    def _victims(self, generation: Generation) -> list[Session]:
        return super()._victims(generation)[::-1]


class PriorityIsIgnored(PagedSessionScheduler):
    def _turns(self) -> list[tuple[Session, Generation]]:
        return sorted(super()._turns(), key=lambda turn: turn[1].arrival)


class EarlierTurnsAreVictims(PagedSessionScheduler):
    def _victims(self, generation: Generation) -> list[Session]:
        return [session for session, turn in self._turns() if turn is not generation]


class RowsMixClasses(PagedSessionScheduler):
    def __init__(self, pool: BlockPool, **limits: Any) -> None:
        super().__init__(pool, **limits | {"has_token_classes": False})


class RollBackKeepsClasses(PagedSessionScheduler):
    def finish(self, session: Session, *, keep: bool) -> None:
        borders = list(session.class_borders)
        super().finish(session, keep=keep)
        session.class_borders = borders


class RecomputedTokensAreInput(PagedSessionScheduler):
    def _cut(self, session: Session, num_blocks: int) -> tuple[int, ...]:
        if num_blocks == 0:
            session.class_borders.clear()
        return super()._cut(session, num_blocks)


class AppendsLeaveTheLastToken(PagedSessionScheduler):
    def is_appended(self, session: Session) -> bool:
        turn = session.generation
        return turn is not None and turn.appends_only and session.num_pending <= 1


FAULTY_POOLS = (
    *(ReleaseForgetsOne, ReleaseFreesWhatOneOtherHolds, ShareCountsTwice, ShareForgetsOne),
    *(AllocateLeavesOneFree, AllocateCountsTwice),
)
FAULTY_SCHEDULERS = (
    *(VictimsKeepTheirNumber, CommitCountsOneTooMany, CommitMovesFailedRows, RollBackLeavesAToken),
    *(RollBackKeepsItsKv, FailedKvIsKept, SharedBlocksAreWritten, SharedBlocksCountAsReclaimable),
    *(IdleSessionsArePinned, RecentlyUsedGoFirst, PriorityIsIgnored, EarlierTurnsAreVictims),
    *(AppendsLeaveTheLastToken, RowsMixClasses, RollBackKeepsClasses, RecomputedTokensAreInput),
)


@pytest.mark.parametrize(
    "kinds",
    [Kinds(pool=pool) for pool in FAULTY_POOLS] + [Kinds(scheduler=each) for each in FAULTY_SCHEDULERS],
    ids=lambda kinds: (kinds.pool if kinds.pool in FAULTY_POOLS else kinds.scheduler).__name__,
)
def test_a_planted_fault_is_found(kinds: Kinds) -> None:
    def find() -> None:
        for seed in range(MAX_SEEDS_TO_FIND):
            simulate(seed, kinds=kinds)

    # A fault shows as a Violation, or as what scheduler and pool themselves run into.
    with pytest.raises((Violation, ValueError, IndexError, KeyError)) as found:
        find()
    assert "--seed " in "".join(found.value.__notes__)


def test_the_command_line_tells_what_did_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulator.main(["--num-seeds", "3"]) == 0
    assert "3 seeds" in capsys.readouterr().out
    assert simulator.main(["--steps", "300"]) == 0
    assert ", 0 violations" in capsys.readouterr().out
    monkeypatch.setattr(
        simulator, "simulate", lambda seed: simulate(seed, kinds=Kinds(pool=ReleaseForgetsOne))
    )
    assert simulator.main(["--num-seeds", "30"]) == 1
    assert "seed 0: " in capsys.readouterr().out
