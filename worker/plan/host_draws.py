"""Draws of a step by `worker.sampling`, from rows of logits in host memory. Knows no kernels."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker.batch import Drawn
from worker.sampling import Draw, draw_tokens


class HostDraws:
    """Draws one row after the other, the way that all others are compared with.

    Args:
        rows: Where a run leaves its logits, [vocab] float32 each; only read.
        vocab_size: Ids from here on are padding, and never drawn.
    """

    def __init__(self, rows: Sequence[npt.NDArray[np.float32]], *, vocab_size: int) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._prepared: tuple[Sequence[int], Sequence[Draw]] = ((), ())

    def prepare(self, places: Sequence[int], draws: Sequence[Draw]) -> int:
        """See `TokenDraws`."""
        check_as_many(places, draws)
        self._prepared = places, draws
        return 0

    def draw(self) -> list[Drawn | None]:
        """See `TokenDraws`."""
        places, draws = self._prepared
        return draw_tokens([self._rows[place] for place in places], draws, vocab_size=self._vocab_size)


def check_as_many(places: Sequence[int], draws: Sequence[Draw]) -> None:
    """Raises ValueError unless there is a draw for each row of logits."""
    if len(draws) != len(places):
        raise ValueError(f"draws has {len(draws)}, the step has {len(places)} rows that want logits")
