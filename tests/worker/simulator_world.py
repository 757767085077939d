"""The simulator's world: sessions, other holders of their blocks, and all that clients may do to them."""

import random
from collections import Counter
from dataclasses import dataclass, replace

from tests.worker.simulator_checks import check_state
from tests.worker.simulator_model import VOCAB_SIZE, Alone, FakeModel, require
from worker.errors import OutOfBlocks, Refused
from worker.kv.block_pool import BlockPool
from worker.scheduler import PagedSessionScheduler
from worker.session import Generation, Session


@dataclass(frozen=True, slots=True)
class Kinds:
    """The classes under test; a test of the simulator plants its faults here."""

    pool: type[BlockPool] = BlockPool
    scheduler: type[PagedSessionScheduler] = PagedSessionScheduler


@dataclass(frozen=True, slots=True)
class Lent:
    """Full blocks of a committed log that another holder than a session shares, as a prefix cache will.

    Attributes:
        blocks: The blocks.
        digests: What they stored when they were shared.
    """

    blocks: tuple[int, ...]
    digests: tuple[list[int], ...]


@dataclass(slots=True)
class Client:
    """One session with its twin that is run alone, and what the machine wants of its turn.

    Attributes:
        session: The scheduler's.
        alone: What it has to be.
        max_tokens: The running turn's.
        num_computed: Before the running turn.
        has_lost_kv: Whether the running turn lost blocks.
    """

    session: Session
    alone: Alone
    max_tokens: int = 0
    num_computed: int = 0
    has_lost_kv: bool = False


class World:
    """Scheduler, pool, model and clients of one seed, and the commands that change them between steps.

    Args:
        seed: Decides everything.
        kinds: Classes under test.
        fail_rate: Share of allocations that fail; None: as the seed has it.
        failing_allocation: The number of one allocation that fails, from 1; 0: none.
    """

    def __init__(
        self,
        seed: int,
        kinds: Kinds | None = None,
        *,
        fail_rate: float | None = None,
        failing_allocation: int = 0,
    ) -> None:
        kinds = kinds or Kinds()
        self._rng = rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._failing = failing_allocation
        seeds_rate = rng.choice((0.0, 0.0, 0.03, 0.3))
        self._fail_rate = seeds_rate if fail_rate is None else fail_rate
        size = rng.choice((1, 2, 3, 4, 8))
        num_blocks = rng.choice((rng.randint(1, 4), rng.randint(4, 16), rng.randint(16, 40)))
        num_blocks = max(num_blocks, -(-6 // size))
        max_tokens = rng.randint(1, 24)
        self._has_classes = rng.random() < 0.5
        self._pool = kinds.pool(num_blocks)
        self._allocate = self._pool.allocate
        self._let_allocations_fail()
        self._scheduler = kinds.scheduler(
            self._pool,
            block_size=size,
            max_step_tokens=max_tokens,
            max_step_rows=rng.randint(1, min(8, max_tokens)),
            max_context_tokens=rng.choice((8, 24, 60, 100)),
            has_token_classes=self._has_classes,
        )
        self._size = size
        self._model = FakeModel(num_blocks, size)
        self._clients: dict[str, Client] = {}
        self._lent: list[Lent] = []
        self._max_sessions = rng.randint(1, 8)
        self._priorities = rng.choice(((0,), (0, 0, 1), (-2, 0, 3)))
        self._nan_rate = rng.choice((0.0, 0.0, 0.05))
        rates = {
            self._open_some: 2,
            self._submit: 6,
            self._cancel: rng.choice((0, 0.2, 1)),
            self._close_some: 0.1,
            self._change_priority: 0.5,
            self._lend: rng.choice((0, 0.5, 1.5)),
            self._take_back: 0.4,
            self._fork: rng.choice((0, 0.5, 2)),
        }
        self._commands, self._weights = list(rates), list(rates.values())
        self._max_commands = rng.choice((1, 4))

    def command(self) -> None:
        """Do what clients do between two steps."""
        for command in self._rng.choices(self._commands, self._weights, k=self._max_commands):
            command()

    def check(self) -> None:
        """Check all that has to hold between steps."""
        sessions = {name: client.session for name, client in self._clients.items()}
        alone = {name: client.alone for name, client in self._clients.items()}
        check_state(self._scheduler, sessions, alone, [lent.blocks for lent in self._lent])

    def _let_allocations_fail(self) -> None:
        """Have the pool refuse by chance, or at one chosen call, what it could give."""

        def allocate_or_fail(count: int) -> list[int]:
            self.counts["allocations"] += 1
            is_chosen = self.counts["allocations"] == self._failing
            if is_chosen or self._rng.random() < self._fail_rate:
                self.counts["failed allocations"] += 1
                raise OutOfBlocks(wanted=count, free=self._pool.num_free)
            return self._allocate(count)

        self._pool.allocate = allocate_or_fail  # type: ignore[method-assign]  # of this pool alone

    def _end(self, client: Client, *, keep: bool) -> None:
        session, alone = client.session, client.alone
        turn_start, due = alone.committed, session.num_due
        self._scheduler.finish(session, keep=keep)
        if keep:
            alone.commit()
            # Of a turn that is cut the scheduler's own number is taken; of others `_end_whole` knows more.
            alone.due, alone.is_whole = session.num_due, False
            self.counts["kept"] += 1
            return
        alone.roll_back()
        require(session.num_due == due, "a rolled back turn changed what is due")
        if not client.has_lost_kv:
            most = max(turn_start - 1, due)
            require(client.num_computed <= session.num_computed <= most, "a rolled back turn changed its KV")
        self.counts["rolled back"] += 1

    def _open_some(self) -> None:
        if len(self._clients) < self._max_sessions:
            self._open()

    def _open(self) -> Client:
        self.counts["opened"] += 1
        session = self._scheduler.open(f"s{self.counts['opened']}")
        client = self._clients[session.session_id] = Client(session, Alone())
        return client

    def _submit(self) -> None:
        client = self._pick(running=False)
        if client is None:
            return
        rng = self._rng
        session = client.session
        to_border = self._size - session.num_tokens % self._size
        some = rng.randint(1, max(session.max_context_tokens // 2, 1))
        length = rng.choice((0, 1, to_border, min(some, 6), some))
        if session.num_tokens and session.num_pending == 0 and rng.random() < 0.5:
            length = 0  # of all that may follow an append or a fork, the hardest
        turn = Generation(
            generation_id="",
            input_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)),
            priority=rng.choice(self._priorities),
            appends_only=rng.random() < 0.25,
        )
        has_room = session.num_tokens + length < session.max_context_tokens
        has_work = length > 0 or (session.num_tokens > 0 and not turn.appends_only)
        before = replace(
            session,
            token_ids=list(session.token_ids),
            class_borders=list(session.class_borders),
        )
        try:
            self._scheduler.submit(session, turn)
        except Refused:
            require(not (has_room and has_work), "a turn was refused that fits")
            require(session == before, "a refused turn changed its session")
            self.counts["refused"] += 1
            if rng.random() < 0.4:  # the log may be full for good
                self._close(client)
            return
        require(has_room and has_work, "a turn was taken that does not fit")
        client.alone.append(turn.input_ids)
        client.max_tokens = rng.choice((1, rng.randint(1, 5), rng.randint(1, 30)))
        client.num_computed = session.num_computed
        client.has_lost_kv = False
        self.counts["appends" if turn.appends_only else "continues" if length == 0 else "turns"] += 1

    def _cancel(self) -> None:
        client = self._pick(running=True)
        if client is not None:
            self._end(client, keep=self._rng.random() < 0.4)

    def _close_some(self) -> None:
        if (client := self._pick(running=False)) is not None:
            self._close(client)

    def _close(self, client: Client) -> None:
        self._scheduler.close(client.session)
        del self._clients[client.session.session_id]
        self.counts["closed"] += 1

    def _change_priority(self) -> None:
        client = self._pick(running=True)
        if client is not None and client.session.generation is not None:
            self._scheduler.prioritise(client.session.generation, self._rng.choice(self._priorities))

    def _lend(self) -> None:
        client = self._pick()
        blocks = () if client is None else self._committed_blocks(client)
        if blocks:
            self._pool.share(blocks)
            self._lent.append(Lent(blocks, self._stored(blocks)))
            self.counts["lent"] += 1

    def _take_back(self) -> None:
        if self._lent:
            lent = self._lent.pop(self._rng.randrange(len(self._lent)))
            require(self._stored(lent.blocks) == lent.digests, "a shared block was written")
            self._pool.release(lent.blocks)

    def _fork(self) -> None:
        """A new session whose log begins as another's and shares its blocks, as a fork will."""
        parent = self._pick()
        blocks = () if parent is None else self._committed_blocks(parent)
        if parent is None or not blocks or len(self._clients) == self._max_sessions:
            return
        child = self._open()
        child.alone = alone = parent.alone.head(len(blocks) * self._size)
        self._pool.share(blocks)
        child.session.token_ids = list(alone.ids)
        borders = parent.session.class_borders
        child.session.class_borders = [border for border in borders if border < len(alone.ids)]
        child.session.block_table = blocks
        child.session.num_computed = child.session.num_due = alone.due
        self.counts["forks"] += 1

    def _committed_blocks(self, client: Client) -> tuple[int, ...]:
        """Some of the full blocks of what is committed, from the first on."""
        full = min(client.session.num_computed, client.alone.committed) // self._size
        return client.session.block_table[: self._rng.choice((full, self._rng.randint(0, full)))]

    def _stored(self, blocks: tuple[int, ...]) -> tuple[list[int], ...]:
        return tuple(self._model.block(block) for block in blocks)

    def _pick(self, *, running: bool | None = None) -> Client | None:
        clients = [
            client
            for client in self._clients.values()
            if running is None or (client.session.generation is not None) == running
        ]
        return self._rng.choice(clients) if clients else None
