"""A device that takes steps ahead of what was read, and a model of hashes that runs on it.

In place of `Runner`: a launched step runs at once, in the order of launches, as on a device's stream, but
what it drew is told only when it is read. Tokens that the host does not know are fed from what the device
drew. KV is a chained digest of the log (`simulator_model.py`), so that a wrong or missing token anywhere in
it, a stale block or a slot that another row wrote changes every draw that follows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.worker.simulator_model import extend
from worker.batch import UNKNOWN_TOKEN, Batch, DecodePlan, Drawn, PlanAction, Row, RowResult, TokenClass
from worker.plan.device import DeviceLost
from worker.runner import StepDraws
from worker.sampling import Draw

VOCAB = 96
_ROOT = 0x13198A2E03707344
_GARBAGE = -2


def digest_of(log: Sequence[int]) -> int:
    """Of a whole log."""
    digest = _ROOT
    for token_id in log:
        digest = extend(digest, token_id)
    return digest


def draw_of(digest: int, banned: frozenset[int] = frozenset(), *, nan_every: int = 0) -> int | None:
    """What follows a log of this digest; None: the logits are NaN."""
    if nan_every and digest // 7 % nan_every == 0:
        return None
    token_id = digest // 5 % VOCAB
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB
    return token_id


class FakeTokenizer:
    """Letters: token n is one of 26, so that texts repeat and stop sequences are met."""

    vocab_size = VOCAB
    eos_ids = frozenset({0})

    def token_bytes(self, token_id: int) -> bytes:
        """Its letter."""
        assert 0 <= token_id < VOCAB
        return bytes([ord("a") + token_id % 26])


@dataclass(slots=True)
class Flight:
    """A launched step."""

    device: "FakeDevice"
    batch: Batch
    draws: tuple[Draw, ...]
    drawn: list[int | None]
    is_read: bool = False

    def read(self) -> StepDraws:
        """As `Launched` says."""
        device = self.device
        assert device.in_flight[0] is self, "steps are read in their order, and once"
        device.in_flight.pop(0)
        device.log.append(("read", len(self.batch.rows)))
        if device.fails_read(self.batch):
            raise RuntimeError("read")
        rows = len(self.batch.rows)
        result = RowResult(PlanAction.REUSED, 1, 2, 0, 5, 100 * rows, 1000, rows)
        # A draw that the host makes reads the log now.
        for draw in self.draws:
            assert draw.sampling.repetition_penalty == 1.0 or UNKNOWN_TOKEN not in draw.log
        drawn = [None if token is None else Drawn(token) for token in self.drawn]
        return StepDraws(drawn, (result,) * rows, 3)


@dataclass(slots=True)
class FakeDevice:
    """Attributes say how it behaves, and what it saw.

    Attributes:
        num_blocks: Of the pool.
        block_size: Tokens per block.
        is_ahead: Whether it lets steps be launched before the last was read.
        has_token_classes: As of `Runner`.
        nan_every: One of so many logs has NaN for logits; 0: none.
        fails_launch: Batches whose launch raises.
        fails_read: Batches whose read raises.
        is_lost: Whether it is beyond use once a batch has failed.
        before_launch: Called with each batch.
        log: ("launch" | "read", rows) in their order.
        in_flight: Launched and not read.
        num_fed: Tokens that only the device knew.
    """

    num_blocks: int
    block_size: int
    is_ahead: bool = True
    has_token_classes: bool = True
    nan_every: int = 0
    fails_launch: Callable[[Batch], bool] = lambda _: False
    fails_read: Callable[[Batch], bool] = lambda _: False
    is_lost: bool = False
    before_launch: Callable[[Batch], None] = lambda _: None
    log: list[tuple[str, int]] = field(default_factory=list)
    in_flight: list[Flight] = field(default_factory=list)
    num_fed: int = 0
    _fed: dict[str, int] = field(default_factory=dict)
    _kv: dict[int, int] = field(default_factory=dict)

    def runs_ahead(self, draws: Sequence[Draw]) -> bool:
        """As of `Runner`."""
        return self.is_ahead and all(draw.sampling.repetition_penalty == 1.0 for draw in draws)

    def launch(self, batch: Batch, draws: Sequence[Draw]) -> Flight:
        """As of `Runner`."""
        assert len(self.in_flight) <= 1, "at most two are in flight"
        assert len({(row.plan, row.token_class) for row in batch.rows}) == 1
        assert len(draws) == sum(row.wants_logits for row in batch.rows)
        if batch.rows[0].plan is DecodePlan.REPLAN:
            assert not self.in_flight, "a REPLAN turn is launched on nothing that is not read"
        self.before_launch(batch)
        if self.fails_launch(batch):
            raise RuntimeError("launch")
        self.log.append(("launch", len(batch.rows)))
        of_row, drawn = iter(draws), []
        for row in batch.rows:
            digest = self._compute(row)
            if row.wants_logits:
                draw = next(of_row)
                assert len(draw.log) == row.context_len
                token_id = draw_of(digest, draw.banned, nan_every=self.nan_every)
                drawn.append(token_id)
                self._fed[row.session_id] = _GARBAGE if token_id is None else token_id
                if token_id is None:
                    self._kv |= {self._slot(row, at): _GARBAGE for at in range(row.position, row.context_len)}
        flight = Flight(self, batch, tuple(draws), drawn)
        self.in_flight.append(flight)
        return flight

    def check_device(self) -> None:
        """As of `Runner`."""
        if self.is_lost:
            raise DeviceLost("beyond use")

    def zero(self, blocks: Sequence[int]) -> None:
        """As of `Runner`."""
        for block in blocks:
            for slot in range(block * self.block_size, (block + 1) * self.block_size):
                self._kv.pop(slot, None)

    def _compute(self, row: Row) -> int:
        *known, last = row.token_ids
        assert UNKNOWN_TOKEN not in known, "what the device drew stands last"
        if last == UNKNOWN_TOKEN:
            assert self.in_flight, "nothing in flight draws it"
            assert row.session_id in {each.session_id for each in self.in_flight[-1].batch.rows}
            assert row.token_class is TokenClass.DECODE
            last = self._fed[row.session_id]
            self.num_fed += 1
        digest = self._kv.get(self._slot(row, row.position - 1), 0) if row.position else _ROOT
        for offset, token_id in enumerate((*known, last)):
            digest = extend(digest, token_id)
            self._kv[self._slot(row, row.position + offset)] = digest
        return digest

    def holds_garbage(self) -> bool:
        """Whether what a row of NaN left is anywhere in the pool."""
        return _GARBAGE in self._kv.values()

    def _slot(self, row: Row, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return row.block_table[block] * self.block_size + offset


def expected_tokens(
    log: Sequence[int],
    *,
    max_tokens: int,
    max_context_tokens: int,
    ends: Mapping[int, str],
    stop_sequence: str,
    nan_every: int,
) -> tuple[list[int], str]:
    """What a turn draws after `log` if nobody cuts it, told anew from the rules, and how it ends."""
    digest, drawn, text = digest_of(log), [], ""
    while True:
        token_id = draw_of(digest, nan_every=nan_every)
        if token_id is None:
            return drawn, "NUMERIC_FAILURE"
        drawn.append(token_id)
        text += chr(ord("a") + token_id % 26)
        if token_id in ends:
            return drawn, ends[token_id]
        if stop_sequence and stop_sequence in text:
            return drawn, "STOP_SEQUENCE"
        if len(drawn) == max_tokens:
            return drawn, "MAX_TOKENS"
        if len(log) + len(drawn) == max_context_tokens:
            return drawn, "CONTEXT_FULL"
        digest = extend(digest, token_id)
