"""What the simulator puts in the model's place: a model of hashes, and each session run alone.

A token's digest is a chained hash of the log up to it, so it stands for id, position and all
tokens before. The model stores digests where a real one stores KV, and draws the next token from
the last one: a wrong, stale or missing token anywhere in a log changes all that follow.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from worker.batch import Batch, Row, TokenClass

VOCAB_SIZE = 1 << 20
_ROOT = 0x243F6A8885A308D3
_NOTHING = 0
_SPOILT = 1


class Violation(AssertionError):
    """A promise of scheduler or pool that did not hold."""


def require(holds: bool, what: str) -> None:  # noqa: FBT001  reads as a sentence: require(x == y, "…")
    """Raise Violation unless it holds."""
    if not holds:
        raise Violation(what)


def extend(digest: int, token_id: int) -> int:
    """The digest of a log with one more token (a 64-bit multiply-and-fold mix)."""
    mixed = ((digest ^ token_id) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ mixed >> 31


def next_token(digest: int) -> int:
    """What the model draws after a log of this digest."""
    return digest % VOCAB_SIZE


@dataclass(slots=True)
class Alone:
    """A session run alone, with all the memory in the world: what its log and numbers have to be.

    Attributes:
        ids: The log.
        digests: Of each prefix of it.
        classes: Of each token: input is PREFILL, drawn tokens are DECODE.
        committed: Length of the committed log.
        revision: Committed turns.
        due: Tokens whose KV the last turns left; None after a turn that was cut, where the scheduler's
            own number is taken.
        is_whole: Whether all of the KV that is due is still stored.
    """

    ids: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    classes: list[TokenClass] = field(default_factory=list)
    committed: int = 0
    revision: int = 0
    due: int = 0
    is_whole: bool = True

    def append(self, token_ids: Iterable[int], token_class: TokenClass = TokenClass.PREFILL) -> None:
        """Let tokens join the log."""
        for token_id in token_ids:
            self.classes.append(token_class)
            self.digests.append(extend(self.digests[-1] if self.digests else _ROOT, token_id))
            self.ids.append(token_id)

    def draw(self) -> None:
        """Let the model's next token join the log."""
        self.append([next_token(self.digests[-1])], TokenClass.DECODE)

    def commit(self) -> None:
        """End a turn."""
        self.committed = len(self.ids)
        self.revision += 1

    def roll_back(self) -> None:
        """As if the turn had never been."""
        del self.ids[self.committed :], self.digests[self.committed :], self.classes[self.committed :]

    def head(self, num_tokens: int) -> "Alone":
        """A session of its own that begins with these tokens, all of which have KV."""
        ids, digests, classes = (each[:num_tokens] for each in (self.ids, self.digests, self.classes))
        return Alone(ids, digests, classes, committed=num_tokens, due=num_tokens)


class FakeModel:
    """Reads and writes the slots of every row as attention would, and checks all that it reads."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._kv = [_NOTHING] * (num_blocks * block_size)

    def run(self, batch: Batch, alone: Mapping[str, Alone]) -> list[int]:
        """One token for each row that wants logits.

        Violation where a row attends a slot that does not hold its log's prefix. All rows have written
        before the first is checked, so a row that writes over another one's slots is found too.
        """
        drawn = []
        for row in batch.rows:
            digest = self._kv[self._slot(row, row.position - 1)] if row.position else _ROOT
            for offset, token_id in enumerate(row.token_ids):
                digest = extend(digest, token_id)
                self._kv[self._slot(row, row.position + offset)] = digest
            if row.wants_logits:
                drawn.append(next_token(digest))
        for row in batch.rows:
            own = alone[row.session_id].digests
            for index in range(-(-row.context_len // self._block_size)):
                start, end = index * self._block_size, min((index + 1) * self._block_size, row.context_len)
                stored = self.block(row.block_table[index])[: end - start]
                require(
                    stored == own[start:end],
                    f"{row.session_id} attends other KV than its own in block {row.block_table[index]}",
                )
        return drawn

    def spoil(self, row: Row) -> None:
        """Leave behind what a numeric failure does: whoever reads these slots again is found."""
        for position in range(row.position, row.context_len):
            self._kv[self._slot(row, position)] = _SPOILT

    def zero(self, blocks: Iterable[int]) -> None:
        """Empty these blocks."""
        for block in blocks:
            start = block * self._block_size
            self._kv[start : start + self._block_size] = [_NOTHING] * self._block_size

    def block(self, block: int) -> list[int]:
        """What a block stores."""
        return self._kv[block * self._block_size : (block + 1) * self._block_size]

    def _slot(self, row: Row, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return row.block_table[block] * self._block_size + offset
