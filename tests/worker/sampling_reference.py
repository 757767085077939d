"""Sampling as it reads in the API, one candidate after the other: the slow twin of `worker.sampling`."""

import math
from collections.abc import Sequence

import numpy as np

from worker.batch import Drawn, Logprob
from worker.sampling import Draw, uniform


def draw_reference(raw: Sequence[float], draw: Draw) -> Drawn | None:
    """One row's draw; `raw` holds the logits of the vocabulary, no padding."""
    if not all(math.isfinite(logit) for logit in raw):
        return None
    kept = kept_reference(raw, draw)
    if not kept:
        return None
    token_id = _inverse(kept, draw)
    return Drawn(token_id, *_logprobs(raw, token_id, draw.sampling.logprobs))


def kept_reference(raw: Sequence[float], draw: Draw) -> dict[int, float]:
    """The candidates that all filters leave and their weights, in id order; empty if all are banned."""
    sampling = draw.sampling
    logits = {
        token_id: logit for token_id, logit in _adjust(raw, draw).items() if token_id not in draw.banned
    }
    ranked = sorted(logits, key=lambda token_id: (-logits[token_id], token_id))
    if not ranked:
        return {}
    if sampling.temperature <= 1e-4:
        return {ranked[0]: 1.0}
    largest = logits[ranked[0]]
    # NumPy's exp, an element at a time: the C library's may differ in the last bit.
    weights = {each: float(np.exp((logits[each] - largest) / sampling.temperature)) for each in ranked}
    ranked = ranked[: sampling.top_k]
    if sampling.top_p < 1.0:
        ranked = _nucleus(ranked, weights, sampling.top_p)
    ranked = [each for each in ranked if weights[each] >= sampling.min_p]
    return {each: weights[each] for each in sorted(ranked)}


def _adjust(raw: Sequence[float], draw: Draw) -> dict[int, float]:
    sampling = draw.sampling
    generated = list(draw.log)[len(draw.log) - draw.num_generated :]
    logits = dict(enumerate(raw))
    for token_id in set(draw.log) & logits.keys():
        if logits[token_id] > 0:
            logits[token_id] /= sampling.repetition_penalty
        else:
            logits[token_id] *= sampling.repetition_penalty
    for token_id in set(generated) & logits.keys():
        times = generated.count(token_id)
        logits[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * times
    for token_id in sampling.logit_bias.keys() & logits.keys():
        logits[token_id] += sampling.logit_bias[token_id]
    return logits


def _nucleus(ranked: list[int], weights: dict[int, float], top_p: float) -> list[int]:
    total = 0.0
    for each in ranked:
        total += weights[each]
    share = 0.0
    for count, each in enumerate(ranked, start=1):
        share += weights[each]
        if share >= top_p * total:
            return ranked[:count]
    raise AssertionError("all of the candidates reach any share")


def _inverse(kept: dict[int, float], draw: Draw) -> int:
    total = 0.0
    for weight in kept.values():
        total += weight
    target = uniform(draw.sampling.seed, 0, len(draw.log)) * total
    share = 0.0
    for token_id, weight in kept.items():
        share += weight
        if share > target:
            return token_id
    return max(each for each, weight in kept.items() if weight)


def _logprobs(
    raw: Sequence[float], token_id: int, count: int | None
) -> tuple[float | None, tuple[Logprob, ...]]:
    if count is None:
        return None, ()
    largest = max(raw)
    log_sum = largest + math.log(math.fsum(math.exp(logit - largest) for logit in raw))
    ranked = sorted(range(len(raw)), key=lambda each: (-raw[each], each))
    return raw[token_id] - log_sum, tuple(Logprob(each, raw[each] - log_sum) for each in ranked[:count])
