"""Logits to token ids. Each row is drawn alone, from its own logits, seed and position.

Draws are counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011): the Philox generator keyed by the seed, its counter set from stream and
position, yields the one uniform number that position needs. No random state is carried
from token to token, so batch, order, preemption and rollback can't move a draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.session import Sampling

_EXPLICIT_STREAM = 0


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row's draw depends on beside its logits: sampling, and the token's position in the log."""

    sampling: Sampling
    position: int


def draw_tokens(logits: npt.NDArray[np.float32], draws: Sequence[Draw], *, vocab_size: int) -> list[int]:
    """Draw one token per row.

    Args:
        logits: float32 [rows, at least vocab_size].
        draws: One per row.
        vocab_size: Ids from here on are padding of the embedding and never drawn.
    """
    return [_draw(row[:vocab_size], draw) for row, draw in zip(logits, draws, strict=True)]


def uniform(seed: int, stream: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, stream, position): the top 53 of 64 Philox bits."""
    bits = np.random.Philox(key=seed, counter=[0, 0, position, stream]).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def _draw(logits: npt.NDArray[np.float32], draw: Draw) -> int:
    if draw.sampling.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64)
    # Subtracting the maximum first keeps tiny temperatures finite: they tend to greedy.
    weights = np.exp((scaled - scaled.max()) / draw.sampling.temperature)
    cumulative = np.cumsum(weights)
    total = float(cumulative[-1])
    target = uniform(draw.sampling.seed, _EXPLICIT_STREAM, draw.position) * total
    # The product may round up to the total, beyond every token's share.
    target = min(target, float(np.nextafter(total, 0.0)))
    return int(np.searchsorted(cumulative, target, side="right"))
