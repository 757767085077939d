"""What the scheduler's tests share: a small scheduler, and steps with a model of hashes."""

from worker.batch import Batch
from worker.kv.block_pool import BlockPool
from worker.scheduler import PagedSessionScheduler
from worker.session import Generation, Session

BLOCK = 4


def small_scheduler(num_blocks: int = 64, **limits: int) -> PagedSessionScheduler:
    """One of blocks of 4 tokens; `tokens` and `rows` bound a step, `context` a log."""
    return PagedSessionScheduler(
        BlockPool(num_blocks),
        block_size=BLOCK,
        max_step_tokens=limits.get("tokens", 16),
        max_step_rows=limits.get("rows", 8),
        max_context_tokens=limits.get("context", 1024),
    )


class Turns:
    """Runs steps, and ends turns when they have as many tokens as they were to have."""

    def __init__(self, scheduler: PagedSessionScheduler) -> None:
        self.scheduler = scheduler
        self._max_tokens: dict[str, int] = {}
        self._sessions: dict[str, Session] = {}

    def submit(
        self, session: Session, ids: tuple[int, ...], max_tokens: int = 4, *, priority: int = 0
    ) -> Generation:
        """Start a turn; 0 tokens: one that only appends."""
        turn = Generation("g", ids, priority=priority, appends_only=max_tokens == 0)
        self.scheduler.submit(session, turn)
        self._max_tokens[session.session_id] = max_tokens
        self._sessions[session.session_id] = session
        return turn

    def step(self) -> Batch:
        """One step; every block table is checked for overlaps, then turns that are done are committed."""
        batch = self.scheduler.schedule()
        pool = self.scheduler.pool
        held = [block for session in self._sessions.values() for block in session.block_table]
        assert len(set(held)) == len(held)
        assert len(held) + pool.num_free == pool.num_blocks
        for row in batch.rows:
            log = tuple(self._sessions[row.session_id].token_ids)
            self.scheduler.commit(row, hash(log) % 1000 if row.wants_logits else None)
        for name, session in self._sessions.items():
            is_drawn = session.num_generated == self._max_tokens[name] > 0
            if session.generation and (is_drawn or self.scheduler.is_appended(session)):
                self.scheduler.finish(session, keep=True)
        return batch

    def run(self, session: Session) -> None:
        """Steps until the session's turn is over."""
        while session.generation:
            assert self.step().rows
