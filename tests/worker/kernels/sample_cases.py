"""Draws for tests of `logits_sample`: rows of logits, their parameters, and the tables that travel."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker.kernels.draw_words import DRAW_WORDS, ENTRY_WORDS
from worker.params import Sampling
from worker.plan.draw_params import write
from worker.sampling import Draw

NOT_BANNED: frozenset[int] = frozenset()


@dataclass
class SampleCase:
    """Arguments of `logits_sample`, and the rows of which they were made."""

    logits: torch.Tensor
    draws: torch.Tensor
    entries: torch.Tensor
    fed: torch.Tensor
    given: Sequence[Draw]
    vocab_size: int

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Fresh ones: logits are changed by a draw."""
        return self.logits.clone(), self.draws, self.entries, self.fed.clone()

    def rows(self, *which: int) -> "SampleCase":
        given = [self.given[row] for row in which]
        return make_case(self.logits[list(which)], given, vocab_size=self.vocab_size)


def make_case(logits: torch.Tensor, given: Sequence[Draw], *, vocab_size: int) -> SampleCase:
    """One row of `logits` per draw; row r has slot r."""
    draws = np.zeros((len(given), DRAW_WORDS), np.int32)
    entries = np.zeros((1000 * len(given), ENTRY_WORDS), np.int32)
    used = 0
    for row, draw in enumerate(given):
        used += write(draw, draws[row], entries[used:], slot=row, first_entry=used)
    return SampleCase(
        logits,
        torch.from_numpy(draws),
        torch.from_numpy(entries[: used + 1]),
        torch.full((len(given) + 1,), -7, dtype=torch.int32),
        given,
        vocab_size,
    )


def any_sampling(random: np.random.Generator, vocab_size: int) -> Sampling:
    """Parameters of every kind, the defaults often; numbers that float32 can't hold among them."""

    def choose(*values):
        return values[random.integers(len(values))]

    return Sampling(
        temperature=float(choose(0.0, 1e-4, 0.3, 0.7, 1.0, 1.0, 1.3, 2.0)),
        top_k=choose(None, None, 1, 2, 7, 40, vocab_size // 2 + 1, vocab_size + 5, 2**32 - 1),
        top_p=float(choose(1.0, 1.0, 0.1, 0.5, 0.9, 0.95, 1e-9)),
        min_p=float(choose(0.0, 0.0, 0.02, 0.3, 1.0)),
        seed=int(random.integers(0, 2**64, dtype=np.uint64)),
        repetition_penalty=float(choose(1.0, 1.0, 1.1, 0.5, 2.0)),
        presence_penalty=float(choose(0.0, 0.0, 0.5, -1.5)),
        frequency_penalty=float(choose(0.0, 0.0, 0.25, -0.3)),
        logit_bias={
            int(i): float(choose(-3.0, 0.5, 8.0)) for i in random.integers(0, vocab_size + 3, choose(0, 0, 3))
        },
        logprobs=choose(None, 0),
    )


def any_draw(random: np.random.Generator, vocab_size: int) -> Draw:
    log = random.integers(0, vocab_size + 3, random.integers(0, 60)).tolist()
    banned = frozenset(random.integers(0, vocab_size, random.integers(0, 3)).tolist())
    return Draw(any_sampling(random, vocab_size), log, int(random.integers(0, len(log) + 1)), banned)


def rows_that_tie(random: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Rows of a wider buffer, as a plan's arena has them; a third of them tie by the hundred."""
    logits = random.normal(scale=3.0, size=(count, width + 30)).astype(np.float32)
    logits[::3] = np.round(logits[::3] * 2) / 2
    logits[1::7] = np.round(logits[1::7])
    return logits[:, :width]
