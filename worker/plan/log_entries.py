"""Entries of penalties that follow a log as it grows: a step counts its new tokens alone. Knows words."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from worker.kernels.draw_words import ENTRY_WORDS, IN_LOG, OFFSET, TOKEN_ID
from worker.plan.draw_params import Words, entries_of
from worker.sampling import Draw


class LogEntries:
    """A row's entries, kept while its draws go on from one another: same parameters, the same log but longer.

    What is kept is compared with the log, token by token, which is far less than to count them again.
    """

    def __init__(self) -> None:
        self._table: Words = np.zeros((0, ENTRY_WORDS), np.int32)
        self._places: dict[int, int] = {}
        self._sampling: object = None
        self._start = 0  # how much of the log the turn was given
        self._log: list[int] = []
        self._times: Counter[int] = Counter()

    def entries(self, draw: Draw) -> Words:
        """The draw's entries, as `entries_of` has them but for their order; good until the next call.

        Raises:
            ValueError: Penalties depend on a token of the log that is not known yet.
        """
        known, log = len(self._log), draw.log
        if (
            draw.sampling is self._sampling
            and not draw.banned
            and len(log) - draw.num_generated == self._start
            and len(log) >= known
            and _head(log, known) == self._log
        ):
            new = [log[place] for place in range(known, len(log))]
            if min(new, default=0) >= 0:
                self._sampling = None  # whatever ends this half-way
                for token_id in new:
                    self._add(draw, token_id)
                self._log += new
                self._sampling = draw.sampling
                return self._table[: len(self._places)]
        return self._begin(draw)

    def _begin(self, draw: Draw) -> Words:
        self._sampling = None
        self._table = entries_of(draw)
        if draw.banned:  # of the next tokens alone
            return self._table
        self._places = {token_id: place for place, token_id in enumerate(self._table[:, TOKEN_ID].tolist())}
        self._start = len(draw.log) - draw.num_generated
        self._log = list(draw.log)
        self._times = Counter(self._log[self._start :])
        self._sampling = draw.sampling
        return self._table

    def _add(self, draw: Draw, token_id: int) -> None:
        """Counts one more token that the turn drew."""
        sampling = draw.sampling
        repeats = sampling.repetition_penalty != 1.0
        counts = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        if not (repeats or counts):
            return
        self._times[token_id] += 1
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._table):
            room: Words = np.zeros((2 * place + 16, ENTRY_WORDS), np.int32)
            room[:place] = self._table
            self._table = room
        offset = -(sampling.presence_penalty + sampling.frequency_penalty * self._times[token_id])
        bias = sampling.logit_bias.get(token_id, 0.0)
        entry = self._table[place]
        entry[TOKEN_ID], entry[IN_LOG] = token_id, repeats
        entry[OFFSET : OFFSET + 2].view(np.float64)[0] = offset + bias if counts else bias


def _head(log: Sequence[int], count: int) -> list[int]:
    head = log[:count]
    return head if isinstance(head, list) else list(head)
