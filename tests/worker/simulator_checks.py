"""What has to hold of scheduler and pool around every step, computed anew from tables and logs."""

from collections import Counter
from collections.abc import Iterable, Mapping

from tests.worker.simulator_model import Alone, require
from worker.batch import Batch, TokenClass
from worker.kv.block_pool import BlockPool
from worker.scheduler import PagedSessionScheduler
from worker.session import Session


def check_state(
    scheduler: PagedSessionScheduler,
    sessions: Mapping[str, Session],
    alone: Mapping[str, Alone],
    others: Iterable[tuple[int, ...]],
) -> None:
    """Counts equal holders, each block is free or held, tables cover what is stored, logs are right.

    Args:
        scheduler: The one under test.
        sessions: All open ones by id.
        alone: What they have to be.
        others: Blocks that other holders than sessions share.
    """
    pool, size = scheduler.pool, scheduler.block_size
    holders = count_holders(sessions.values(), others)
    counted = {block: count for block in range(pool.num_blocks) if (count := pool.num_holders(block))}
    require(counted == holders, f"holders by block: {counted} counted, {dict(holders)} there are")
    require(pool.num_free + len(holders) == pool.num_blocks, "free and held blocks are not all blocks")
    for name, session in sessions.items():
        table = session.block_table
        require(len(set(table)) == len(table), f"{name} holds a block twice")
        require(session.num_computed <= len(table) * size, f"{name}: KV outside its table")
        require(session.num_computed <= session.num_tokens, f"{name}: KV of tokens that it has not")
        require(session.num_tokens <= session.max_context_tokens, f"{name}: a log over its context")
        if session.generation is None:
            require(len(table) == -(-session.num_computed // size), f"{name}: idle, and holds unused blocks")
        require(session.token_ids == alone[name].ids, f"{name}: not the log that it has alone")
        require(session.revision == alone[name].revision, f"{name}: not the revision that it has alone")


class StepCheck:
    """What `schedule` may do: made before it is called, asked after.

    Args:
        scheduler: The one under test.
        sessions: All open ones by id.
        alone: What they have to be.
        others: Blocks that other holders than sessions share.
        has_token_classes: Whether rows are of the classes of their tokens, or all DECODE.
    """

    def __init__(
        self,
        scheduler: PagedSessionScheduler,
        sessions: Mapping[str, Session],
        alone: Mapping[str, Alone],
        others: Iterable[tuple[int, ...]],
        *,
        has_token_classes: bool,
    ) -> None:
        self._alone = alone
        self._has_classes = has_token_classes
        self._pool: BlockPool = scheduler.pool
        self._size = scheduler.block_size
        self._limits = scheduler.max_step_tokens, scheduler.max_step_rows
        self._sessions = sessions
        self._others = tuple(others)
        self._computed = {name: session.num_computed for name, session in sessions.items()}
        self._turns = sorted((name for name in sessions if sessions[name].generation), key=self._rank)

    def lost(self) -> set[str]:
        """Sessions that gave up KV during `schedule`."""
        return {name for name, before in self._computed.items() if self._sessions[name].num_computed < before}

    def check(self, batch: Batch, *, has_injected: bool) -> None:
        """Raise Violation for rows, blocks or victims that the rules don't allow.

        Args:
            batch: What `schedule` returned.
            has_injected: Whether an allocation was made to fail meanwhile, so that turns may be missing.
        """
        names = [row.session_id for row in batch.rows]
        require(
            sum(len(row.token_ids) for row in batch.rows) <= self._limits[0],
            "more tokens than a step may have",
        )
        require(len(names) <= self._limits[1], "more rows than a step may have")
        require(names == [name for name in self._turns if name in names], "rows are out of order")
        self._check_rows(batch)
        if not has_injected:
            self._check_left_out(names)
        self._check_victims(names, has_injected=has_injected)

    def _check_rows(self, batch: Batch) -> None:
        holders = count_holders(self._sessions.values(), self._others)
        budget, num_rows = self._limits
        for row in batch.rows:
            session = self._sessions[row.session_id]
            num_rows -= 1
            classes = set(self._classes(row.session_id, row.position, row.context_len))
            require(classes == {row.token_class}, f"{row.session_id}: a {row.token_class} row of {classes}")
            # Where a token of the other class follows, the rest can't be in this row.
            is_cut = not classes.issuperset(
                self._classes(row.session_id, row.context_len, row.context_len + 1)
            )
            require(
                row.context_len == session.num_tokens or is_cut or len(row.token_ids) >= budget - num_rows,
                f"{row.session_id} leaves more of the budget than the rows behind it can need",
            )
            budget -= len(row.token_ids)
            require(row.position <= session.num_computed, f"{row.session_id} skips tokens")
            require(
                list(row.token_ids) == session.token_ids[row.position : row.context_len] != [],
                f"{row.session_id}: a row of other tokens than its log's",
            )
            written = row.block_table[row.position // self._size : -(-row.context_len // self._size)]
            is_own = all(holders[block] == 1 == self._pool.num_holders(block) for block in written)
            require(is_own, f"{row.session_id} writes into a block that others hold")

    def _classes(self, name: str, start: int, end: int) -> list[TokenClass]:
        classes = self._alone[name].classes[start:end]
        return classes if self._has_classes else [TokenClass.DECODE] * len(classes)

    def _check_left_out(self, names: list[str]) -> None:
        """A turn is passed over only for want of blocks; the first, only if none can be reclaimed for it."""
        for place, name in enumerate(self._turns):
            session = self._sessions[name]
            if name in names or (place and not set(names) & set(self._turns[place + 1 :])):
                continue
            available = self._pool.num_free + (self._reclaimable(name) if place == 0 else 0)
            needed = -(-session.num_tokens // self._size) - session.next_position // self._size
            require(available < needed, f"{name} is left out though {available} blocks are there for it")

    def _reclaimable(self, name: str) -> int:
        kept = {block for blocks in self._others for block in blocks} | set(self._sessions[name].block_table)
        held = {block for session in self._sessions.values() for block in session.block_table}
        return len(held - kept)

    def _check_victims(self, names: list[str], *, has_injected: bool) -> None:
        """Blocks are taken from idle sessions first, oldest first, then from turns, the last first."""
        lost = self.lost()
        preempted = [name for name in self._turns if name in lost and name not in names]
        if preempted and not has_injected:
            require(
                any(self._rank(name) < self._rank(preempted[0]) for name in names),
                f"{preempted[0]} lost its blocks to a turn after it",
            )
        if lost & set(names):
            return  # a row gave up a block that it shared: what others hold alone has changed since
        idle = sorted(self._sessions.keys() - set(self._turns), key=lambda n: self._sessions[n].last_active)
        order = idle + [name for name in reversed(self._turns) if name not in names]
        last = max((place for place, name in enumerate(order) if name in lost), default=0)
        for name in order[:last]:
            alone = any(self._pool.num_holders(block) == 1 for block in self._sessions[name].block_table)
            require(not alone, f"{order[last]} lost its blocks before {name}")

    def _rank(self, name: str) -> tuple[int, int]:
        turn = self._sessions[name].generation
        return (0, 0) if turn is None else (-turn.priority, turn.arrival)


def count_holders(sessions: Iterable[Session], others: Iterable[tuple[int, ...]]) -> Counter[int]:
    """How many hold each block, by the tables of sessions and what others share."""
    holders: Counter[int] = Counter()
    for session in sessions:
        holders.update(session.block_table)
    for blocks in others:
        holders.update(blocks)
    return holders
