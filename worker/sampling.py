"""Logits to tokens. Each row is drawn alone, from its own logits, log and `Sampling`.

Draws are counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011): the Philox generator keyed by the seed, its counter set from stream and
position, yields the one uniform number that position needs. No random state is carried
from token to token, so batch, order, preemption and rollback can't move a draw.

Order: repetition, presence and frequency penalties, bias, bans, temperature, top_k,
top_p, min_p. Knows no sessions, no text and no tensors of torch.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from worker.batch import Drawn, Logprob
from worker.params import Sampling

_STREAM = 0

# At or below it every draw is greedy. A logit 0.005 short of the largest would keep less than e**-50
# of its odds, so that only ties and next to ties could tell the two apart; and no quotient overflows.
GREEDY_TEMPERATURE = 1e-4

_Floats = npt.NDArray[np.floating[Any]]
_Doubles = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]


class Draw(NamedTuple):
    """What one row's draw depends on beside its logits.

    Attributes:
        sampling: How to draw.
        log: Every token before the one to draw; its length is the draw's position. Only read. Where a step
            is launched before the one before it was read, UNKNOWN_TOKEN stands at its end until that is.
        num_generated: How many at the end of `log` this generation drew.
        banned: Ids that are not drawn, whatever their logit.
    """

    sampling: Sampling
    log: Sequence[int]
    num_generated: int
    banned: frozenset[int]


def draw_tokens(
    logits: Sequence[npt.NDArray[np.float32]], draws: Sequence[Draw], *, vocab_size: int
) -> list[Drawn | None]:
    """Draw one token per row, from the logits where they lie.

    Args:
        logits: Rows, each float32 [at least vocab_size], that may be views of a buffer of somebody else's:
            they are only read, and nothing of them is kept.
        draws: One per row.
        vocab_size: Ids from here on are padding of the embedding: never drawn, and without effect in a
            log, a bias or a ban.

    Returns:
        One per row; None where no token can be told: one of the row's first `vocab_size` logits is NaN
        or infinite, or all of these ids are banned.
    """
    return [_draw(row[:vocab_size], draw) for row, draw in zip(logits, draws, strict=True)]


def uniform(seed: int, stream: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, stream, position): the top 53 of 64 Philox bits."""
    bits = np.random.Philox(key=seed, counter=[0, 0, position, stream]).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def _draw(raw: npt.NDArray[np.float32], draw: Draw) -> Drawn | None:
    # A NaN is both the largest and the smallest of its row.
    if not (np.isfinite(raw.max()) and np.isfinite(raw.min())):
        return None
    logits = _adjusted(raw, draw)
    if draw.banned and logits.max() == -np.inf:
        return None
    token_id = _pick(logits, draw.sampling, len(draw.log))
    count = draw.sampling.logprobs
    return Drawn(token_id) if count is None else _with_logprobs(token_id, raw, count)


def _adjusted(raw: npt.NDArray[np.float32], draw: Draw) -> _Floats:
    """The logits after penalties, bias and bans, a float64 copy; `raw` itself where there are none.

    Repetition divides a positive logit of any token of the log and multiplies another one (Keskar et al.,
    "CTRL", 2019, with the sign rule of Hugging Face's processor). Then a token that occurs c > 0 times in
    this generation loses presence + frequency * c (OpenAI's formula).
    """
    sampling = draw.sampling
    repeats = sampling.repetition_penalty != 1.0
    counts = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    if not (repeats or counts or sampling.logit_bias or draw.banned):
        return raw
    logits = raw.astype(np.float64)
    if repeats:
        ids, _ = _occurrences(draw.log, logits.size)
        seen = logits[ids]
        penalty = sampling.repetition_penalty
        logits[ids] = np.where(seen > 0.0, seen / penalty, seen * penalty)
    if counts:
        generated = draw.log[len(draw.log) - draw.num_generated :]
        ids, times = _occurrences(generated, logits.size)
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times
    for token_id, bias in sampling.logit_bias.items():
        if token_id < logits.size:
            logits[token_id] += bias
    logits[_known(draw.banned, logits.size)] = -np.inf
    return logits


def _known(token_ids: Iterable[int], vocab_size: int) -> _Ids:
    """Those of `token_ids` that have a logit, int64."""
    ids = np.fromiter(token_ids, np.int64)
    return ids[ids < vocab_size]


def _occurrences(token_ids: Sequence[int], vocab_size: int) -> tuple[_Ids, _Ids]:
    """The distinct ids that have a logit, ascending, and how often each occurs; int64."""
    times = np.bincount(_known(token_ids, vocab_size), minlength=vocab_size)
    ids = np.flatnonzero(times)
    return ids, times[ids]


def _pick(logits: _Floats, sampling: Sampling, position: int) -> int:
    """The largest logit, or a draw by the inverse of the kept candidates' cumulative weight in id order."""
    if sampling.temperature <= GREEDY_TEMPERATURE:
        return int(logits.argmax())
    num_kept = _num_kept(logits, sampling)
    kept = None if num_kept == logits.size else _most_likely(logits, num_kept)
    weights = _weights(logits if kept is None else logits[kept], sampling.temperature)
    cumulative = np.cumsum(weights)
    total = float(cumulative[-1])
    target = uniform(sampling.seed, _STREAM, position) * total
    # The product may round up to the total, beyond every token's share.
    target = min(target, float(np.nextafter(total, 0.0)))
    index = int(np.searchsorted(cumulative, target, side="right"))
    return index if kept is None else int(kept[index])


def _num_kept(logits: _Floats, sampling: Sampling) -> int:
    """How many candidates are left: each filter keeps a prefix of the ranking, so the shortest one wins."""
    count = logits.size if sampling.top_k is None else min(sampling.top_k, logits.size)
    if sampling.top_p >= 1.0 and sampling.min_p <= 0.0:
        return count
    candidates = logits
    if count < logits.size:
        candidates = np.partition(logits, logits.size - count)[logits.size - count :]
    if sampling.top_p < 1.0:
        candidates = np.sort(candidates)[::-1]
    weights = _weights(candidates, sampling.temperature)
    if sampling.top_p < 1.0:
        shares = np.cumsum(weights)
        count = int(np.searchsorted(shares, sampling.top_p * shares[-1], side="left")) + 1
    if sampling.min_p > 0.0:
        count = min(count, int(np.count_nonzero(weights >= sampling.min_p)))
    return count


def _weights(logits: _Floats, temperature: float) -> _Doubles:
    """Probabilities relative to the largest one's, float64."""
    scaled = logits.astype(np.float64)
    weights: _Doubles = np.exp((scaled - scaled.max()) / temperature)
    return weights


def _most_likely(logits: _Floats, count: int) -> _Ids:
    """Ids of the `count` largest logits, ascending; of equal logits the lower ids. Int64 [count]."""
    border = np.partition(logits, logits.size - count)[logits.size - count]
    above = np.flatnonzero(logits > border)
    ties = np.flatnonzero(logits == border)[: count - above.size]
    return np.sort(np.concatenate([above, ties]))


def _with_logprobs(token_id: int, raw: npt.NDArray[np.float32], count: int) -> Drawn:
    """The draw with log softmax, x - max - log(sum(exp(x - max))), of its token and the `count` likeliest."""
    below = raw.astype(np.float64)
    below -= below.max()
    log_sum = float(np.log(np.exp(below).sum()))

    def logprob(of: int) -> float:
        return float(below[of]) - log_sum

    top: list[int] = []
    if count > 0:
        ids = _most_likely(raw, min(count, raw.size))
        top = ids[np.argsort(-raw[ids], kind="stable")].tolist()
    return Drawn(token_id, logprob(token_id), tuple(Logprob(each, logprob(each)) for each in top))
