"""Native programs that run and draw, from the logits where they lie. Knows words and memory, no model."""

from collections.abc import Sequence
from time import monotonic_ns

import numpy as np
import numpy.typing as npt
import pagecast_native

from worker.batch import Drawn
from worker.kernels.draw_words import DRAW_WORDS, ENTRY_WORDS, POSITION
from worker.plan.draw_params import Words, most_entries, write_words
from worker.plan.executor import DrawnRun
from worker.plan.host_draws import HostDraws, check_as_many
from worker.plan.log_entries import LogEntries
from worker.sampling import Draw

_Rows = npt.NDArray[np.float32]
_new = tuple.__new__
"""Makes a named tuple without its own `__new__`, which is Python."""


class NativeDraws:
    """Runs a program and draws with a `pagecast_native.Sampler`, in one call.

    Rows that want the likeliest tokens told are drawn by the host.

    A row's words stay from step to step: while its session draws by the same parameters, and by nothing that
    its log changes, a step writes its position alone; entries of penalties follow the log. Which of the two
    draws a row depends on its own request.

    Args:
        team: The program's threads, which share the rows.
        program: What runs.
        output: Where it leaves its logits, [rows, vocab] float32, rows side by side or further apart. A
            draw changes those of penalties, bias and bans, and puts them back.
        vocab_size: Ids from here on are padding, and never drawn.
        kernel_set: One of `pagecast_native.kernel_sets()`; None: the machine's best.
    """

    def __init__(
        self,
        team: pagecast_native.Team,
        program: pagecast_native.Program,
        output: _Rows,
        *,
        vocab_size: int,
        kernel_set: str | None = None,
    ) -> None:
        self._program = program
        num_rows = len(output)
        self._words = np.zeros((num_rows, DRAW_WORDS), np.int32)
        self._flat = self._words.reshape(-1).data
        self._entries = np.zeros((0, ENTRY_WORDS), np.int32)
        ids, logprobs = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.float32)
        self._ids, self._logprobs = ids.data, logprobs.data
        self._sampler = pagecast_native.Sampler(
            team, output, self._words, ids, logprobs, vocab_size=vocab_size, kernel_set=kernel_set
        )
        self._host = HostDraws(tuple(output), vocab_size=vocab_size)
        # Whose parameters a row's words are, where these are all that they depend on but the position.
        self._held: list[object] = [None] * num_rows
        self._logs = tuple(LogEntries() for _ in range(num_rows))
        self._places: Sequence[int] = ()
        self._draws: Sequence[Draw] = ()
        self._on_host: list[int] = []
        self._num_entries = 0
        self._has_logprob = [False] * num_rows
        self._tells_ids_alone = True

    def prepare(self, places: Sequence[int], draws: Sequence[Draw]) -> int:
        """See `TokenDraws`."""
        check_as_many(places, draws)
        self._places = self._draws = ()
        self._on_host = []
        self._num_entries = 0
        self._tells_ids_alone = True
        flat, held = self._flat, self._held
        num_bytes = 0
        for index, draw in enumerate(draws):
            place = places[index]
            if held[place] is draw.sampling and not draw.banned:
                flat[place * DRAW_WORDS + POSITION] = len(draw.log)
                num_bytes += 4
            else:
                num_bytes += self._write(index, place, draw)
            if self._has_logprob[place]:
                self._tells_ids_alone = False
        self._places, self._draws = places, draws
        return num_bytes

    def run_and_draw(self, num_tokens: int, num_rows: int, num_logits: int) -> DrawnRun:
        """See `TokenDraws`."""
        entries = self._entries[: self._num_entries] if self._num_entries else None
        kernel_ns, draw_ns, ids = self._program.run_and_draw(
            num_tokens, num_rows, num_logits, self._sampler, len(self._places), entries
        )
        if not self._on_host:
            return kernel_ns, draw_ns, self._found(ids)
        start_ns = monotonic_ns()
        drawn = self._found(ids)
        return kernel_ns, draw_ns + monotonic_ns() - start_ns, drawn

    def _found(self, ids: list[int]) -> list[Drawn | None]:
        """What native code drew, by place, and the host's draws."""
        if self._tells_ids_alone:  # most often: behind a run little is to be touched
            return [None if ids[place] < 0 else _new(Drawn, (ids[place], None, ())) for place in self._places]
        draws = self._draws
        drawn: list[Drawn | None] = []
        for index, place in enumerate(self._places):
            if ids[place] < 0:
                drawn.append(None)
            elif draws[index].sampling.logprobs is None:
                drawn.append(Drawn(ids[place]))
            else:
                drawn.append(Drawn(ids[place], self._logprobs[place]))
        if self._on_host:
            self._draw_on_host(drawn)
        return drawn

    def _write(self, index: int, place: int, draw: Draw) -> int:
        """Writes a row's words and entries; how many bytes these are."""
        self._held[place] = None
        self._has_logprob[place] = draw.sampling.logprobs is not None
        words: Words = self._words[place]
        if draw.sampling.logprobs:
            words[:] = 0
            self._on_host.append(index)
            return words.nbytes
        first = self._num_entries
        if not most_entries(draw):
            # Held beyond this step, whose table of entries is not that of the next.
            write_words(draw, words, slot=-1, first_entry=0, num_entries=0)
            self._held[place] = draw.sampling
            return words.nbytes
        entries = self._logs[place].entries(draw)
        end = first + len(entries)
        if end > len(self._entries):
            room = np.zeros((2 * end, ENTRY_WORDS), np.int32)
            room[:first] = self._entries[:first]
            self._entries = room
        self._entries[first:end] = entries
        write_words(draw, words, slot=-1, first_entry=first, num_entries=len(entries))
        self._num_entries = end
        return words.nbytes + entries.nbytes

    def _draw_on_host(self, drawn: list[Drawn | None]) -> None:
        rows = self._on_host
        self._host.prepare([self._places[index] for index in rows], [self._draws[index] for index in rows])
        for index, found in zip(rows, self._host.draw(), strict=True):
            drawn[index] = found
