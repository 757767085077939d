"""Draws the tokens of a step, in plain torch and NumPy."""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.kernels import draw_words as words

_Doubles = npt.NDArray[np.float64]
_Words = npt.NDArray[np.int32]


def logits_sample(
    logits: Tensor, draws: Tensor, entries: Tensor, fed: Tensor, *, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Draws a token per row as `worker.sampling` does, from parameters in words.

    Logits are changed by their entries, in place: where the log has the token, by the repetition penalty r to
    `x / r` if positive, else to `x * r`; then the entry's offset is added. The candidates, ranked by falling
    logit and rising id, are cut to `top_k`, to the fewest that hold `top_p` of what is left, and to those of
    at least `min_p` of the largest weight `exp((x - max) / temperature)`. The draw is by inverse of the
    cumulative weights in the order of ids.

    Args:
        logits: [L, at least vocab_size] float32; those of entries are changed.
        draws: [L, DRAW_WORDS] int32, see `worker.kernels.draw_words`.
        entries: [all entries, ENTRY_WORDS] int32.
        fed: [slots] int32; the id is written to the row's slot if it has one.
        vocab_size: Ids from here on are padding, never drawn.

    Returns:
        Token ids [L] int32, -1 where none can be told (a logit is NaN or infinite, or all are banned) or none
        was asked for; and their log softmax by the raw logits, [L] float32, NaN where it was not asked for.
    """
    token_ids = torch.full((len(logits),), -1, dtype=torch.int32)
    logprobs = torch.full((len(logits),), math.nan)
    table: _Words = entries.cpu().numpy()
    for row, draw in enumerate(draws.cpu().numpy()):
        flags, slot = int(draw[words.FLAGS]), int(draw[words.SLOT])
        if not flags:
            continue
        raw: _Doubles = logits[row, :vocab_size].double().cpu().numpy()
        first = int(draw[words.FIRST_ENTRY])
        changed = _adjusted(raw, draw, table[first : first + int(draw[words.NUM_ENTRIES])])
        logits[row, :vocab_size] = torch.from_numpy(changed)
        if np.isfinite(raw).all() and changed.max() > -np.inf:
            token_ids[row] = token_id = _pick(changed, draw)
            if flags & words.WANTS_LOGPROB:
                below = raw - raw.max()
                logprobs[row] = below[token_id] - math.log(np.exp(below).sum())
        if slot >= 0:
            fed[slot] = token_ids[row]
    return token_ids.to(logits.device), logprobs.to(logits.device)


def _float64(row: _Words, word: int) -> float:
    return float(row[word : word + 2].view(np.float64)[0])


def _float32(row: _Words, word: int) -> float:
    return float(row[word : word + 1].view(np.float32)[0])


def _adjusted(raw: _Doubles, draw: _Words, entries: _Words) -> _Doubles:
    """Float64 values that float32 holds, as the next reader of the logits sees them."""
    changed = raw.copy()
    repetition = _float64(draw, words.REPETITION)
    for entry in entries:
        token_id = int(entry[words.TOKEN_ID])
        if token_id < len(raw):
            logit = raw[token_id]
            if entry[words.IN_LOG]:
                logit = logit / repetition if logit > 0 else logit * repetition
            changed[token_id] = np.float32(logit + _float64(entry, words.OFFSET))
    return changed


def _pick(logits: _Doubles, draw: _Words) -> int:
    if draw[words.FLAGS] & words.GREEDY:
        return int(logits.argmax())
    ranked = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[ranked] - logits.max()) / _float32(draw, words.TEMPERATURE))
    if draw[words.TOP_K]:
        ranked, weights = ranked[: draw[words.TOP_K]], weights[: draw[words.TOP_K]]
    shares = np.cumsum(weights)
    count = len(ranked)
    if (top_p := _float64(draw, words.TOP_P)) < 1.0:
        count = int(np.searchsorted(shares, top_p * shares[-1], side="left")) + 1
    kept = np.zeros(len(logits))
    kept[ranked[:count]] = np.where(weights >= _float32(draw, words.MIN_P), weights, 0.0)[:count]
    cumulative = np.cumsum(kept)
    seed = int(draw[words.SEED : words.SEED + 2].view(np.uint64)[0])
    philox = np.random.Philox(key=seed, counter=[0, 0, int(draw[words.POSITION]), 0])
    random = (int(philox.random_raw()) >> 11) * 2.0**-53
    index = int(np.searchsorted(cumulative, random * cumulative[-1], side="right"))
    # The product may round up to the total, beyond every token's share.
    return min(index, int(np.flatnonzero(kept)[-1]))
