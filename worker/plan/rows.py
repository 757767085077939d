"""What the rows of a step must be, so that no program is given a place outside its memory. Runs nothing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from worker.batch import UNKNOWN_TOKEN, Row
from worker.plan.program import Capacity


class StepTooLarge(ValueError):
    """A step wants more than the plan has room for; nothing was bound."""

    def __init__(self, what: str, *, wanted: int, limit: int) -> None:
        super().__init__(f"{what}: wanted {wanted}, limit {limit}")
        self.what = what
        self.wanted = wanted
        self.limit = limit


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes that rows are checked against.

    Attributes:
        num_tokens: Tokens that a step may hold.
        num_rows: Rows that a step may hold.
        max_context_tokens: Tokens that a row may attend.
        vocab_size: Token ids are below it.
        block_size: Tokens per KV block.
        num_blocks: Blocks of the pool.
    """

    num_tokens: int
    num_rows: int
    max_context_tokens: int
    vocab_size: int
    block_size: int
    num_blocks: int

    @property
    def capacity(self) -> Capacity:
        """What a program needs for such steps."""
        return Capacity(self.num_tokens, self.num_rows, -(-self.max_context_tokens // self.block_size))

    def check(
        self,
        rows: Sequence[Row],
        *,
        is_fed: Callable[[str], bool] | None = None,
        checked_table: Callable[[str], tuple[int, ...]] | None = None,
    ) -> None:
        """Checks the rows of one step.

        Args:
            rows: Of one step.
            is_fed: Tells by its id whether the device knows a session's last token, so that `UNKNOWN_TOKEN`
                may stand for it. None: no token may be unknown.
            checked_table: Gives by its id a session's block table that was checked before, so that only
                what differs costs a look at every block.

        Raises:
            StepTooLarge: Rows, tokens or a row's context are over a limit.
            ValueError: There is no row, or a row's values are wrong; the message names row and field.
        """
        if not rows:
            raise ValueError("rows is empty")
        for what, wanted, limit in (
            ("rows", len(rows), self.num_rows),
            ("tokens", sum(len(row.token_ids) for row in rows), self.num_tokens),
            ("context_len", max(row.context_len for row in rows), self.max_context_tokens),
        ):
            if wanted > limit:
                raise StepTooLarge(what, wanted=wanted, limit=limit)
        sessions: set[str] = set()
        written: set[int] = set()
        for index, row in enumerate(rows):
            if row.session_id in sessions:
                raise ValueError(
                    f"rows[{index}].session_id={row.session_id!r} has a row in this step already"
                )
            sessions.add(row.session_id)
            may_end_unknown = is_fed is not None and is_fed(row.session_id)
            self._check_row(row, f"rows[{index}]", may_end_unknown=may_end_unknown)
            if checked_table is None or row.block_table != checked_table(row.session_id):
                self._check_blocks(row, f"rows[{index}]")
            before = len(written)
            written.update(_slots_of(row, self.block_size))
            if len(written) - before < len(row.token_ids):
                raise ValueError(f"rows[{index}].block_table: a slot would be written twice in one step")

    def _check_row(self, row: Row, where: str, *, may_end_unknown: bool) -> None:
        if not row.token_ids:
            raise ValueError(f"{where}.token_ids is empty")
        known = row.token_ids
        if known[-1] == UNKNOWN_TOKEN and may_end_unknown:
            known = known[:-1]
        if known and (min(known) < 0 or max(known) >= self.vocab_size):
            raise ValueError(f"{where}.token_ids holds an id outside 0..{self.vocab_size - 1}")
        if row.position < 0:
            raise ValueError(f"{where}.position={row.position} is below 0")
        wanted, most = -(-row.context_len // self.block_size), self.capacity.max_blocks
        if not wanted <= len(row.block_table) <= most:
            raise ValueError(
                f"{where}.block_table has {len(row.block_table)} blocks, {wanted} are needed, {most} at most"
            )

    def _check_blocks(self, row: Row, where: str) -> None:
        if min(row.block_table) < 0 or max(row.block_table) >= self.num_blocks:
            raise ValueError(f"{where}.block_table holds a block outside 0..{self.num_blocks - 1}")


def _slots_of(row: Row, block_size: int) -> Iterator[int]:
    for position in range(row.position, row.context_len):
        yield row.block_table[position // block_size] * block_size + position % block_size
