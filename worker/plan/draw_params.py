"""A draw as words for the device, and which draws a device can make. Knows no tensors of torch."""

import struct
from collections import Counter

import numpy as np
import numpy.typing as npt

from worker.kernels.draw_words import DRAWS, ENTRY_WORDS, GREEDY, WANTS_LOGPROB
from worker.sampling import GREEDY_TEMPERATURE, Draw

MAX_ENTRIES = 4096
"""Most tokens of a row whose logits change before its draw: those of penalties, bias and bans."""

_WORDS = struct.Struct("<6iQ2f3d")
_INT32_MAX = 2**31 - 1
_ENTRY = np.dtype([("token_id", "<i4"), ("in_log", "<i4"), ("offset", "<f8")])

Words = npt.NDArray[np.int32]
_NO_ENTRIES: Words = np.zeros((0, ENTRY_WORDS), np.int32)


def fits_device(draw: Draw) -> bool:
    """Whether a device makes the draw: no list of the likeliest tokens is wanted, its entries are few enough.

    The row's own draw alone tells, so that company never changes who draws it.
    """
    if draw.sampling.logprobs:
        return False
    return most_entries(draw) <= MAX_ENTRIES or len(_entries(draw)) <= MAX_ENTRIES


def most_entries(draw: Draw) -> int:
    """No fewer than the draw's entries; 0 tells that it has none, whatever the log becomes."""
    sampling = draw.sampling
    if _repeats(draw):
        most = max(len(draw.log), 1)
    elif _counts(draw):
        most = max(draw.num_generated, 1)
    else:
        most = 0
    return most + len(sampling.logit_bias) + len(draw.banned)


def runs_ahead(draw: Draw) -> bool:
    """Whether the next token may be drawn before the host knows this one: no penalty reads the log."""
    return fits_device(draw) and not _repeats(draw) and not _counts(draw)


def write(draw: Draw, words: Words, entries: Words, *, slot: int, first_entry: int) -> int:
    """Writes a draw for `logits_sample`.

    Args:
        draw: One that `fits_device`.
        words: [DRAW_WORDS] int32, dense; all are written.
        entries: [room, ENTRY_WORDS] int32, dense; the row's entries are written from its start.
        slot: Entry of `fed` that takes the id; negative: none.
        first_entry: Place of `entries[0]` in the whole table.

    Returns:
        Number of entries.

    Raises:
        ValueError: `entries` has no room, or penalties depend on a token of the log that is not known yet;
            nothing was written.
    """
    found = entries_of(draw)
    if len(found) > len(entries):
        raise ValueError(f"entries has room for {len(entries)}, the draw has {len(found)}")
    entries[: len(found)] = found
    write_words(draw, words, slot=slot, first_entry=first_entry, num_entries=len(found))
    return len(found)


def write_words(draw: Draw, words: Words, *, slot: int, first_entry: int, num_entries: int) -> None:
    """Writes all of a draw but its entries; arguments as for `write`."""
    sampling = draw.sampling
    _WORDS.pack_into(
        words.data,
        0,
        DRAWS
        | GREEDY * (sampling.temperature <= GREEDY_TEMPERATURE)
        | WANTS_LOGPROB * (sampling.logprobs is not None),
        slot,
        first_entry,
        num_entries,
        0 if sampling.top_k is None else min(sampling.top_k, _INT32_MAX),
        len(draw.log),
        sampling.seed,
        sampling.temperature,
        sampling.min_p,
        sampling.top_p,
        sampling.repetition_penalty,
        1.0 / sampling.repetition_penalty,
    )


def entries_of(draw: Draw) -> Words:
    """A draw's entries, [n, ENTRY_WORDS] int32, each id once.

    Raises:
        ValueError: Penalties depend on a token of the log that is not known yet.
    """
    found = _entries(draw)
    if not found:
        return _NO_ENTRIES
    rows = np.array([(token_id, *entry) for token_id, entry in found.items()], _ENTRY)
    if rows["token_id"].min() < 0:
        raise ValueError("draw.log holds a token that is not known yet, and its penalties depend on it")
    return rows.view(np.int32).reshape(len(found), -1)


def _repeats(draw: Draw) -> bool:
    return draw.sampling.repetition_penalty != 1.0


def _counts(draw: Draw) -> bool:
    return draw.sampling.presence_penalty != 0.0 or draw.sampling.frequency_penalty != 0.0


def _entries(draw: Draw) -> dict[int, tuple[int, float]]:
    """Token id to whether the repetition penalty covers it, and what is added to its logit after that."""
    sampling = draw.sampling
    if not (sampling.logit_bias or draw.banned or _repeats(draw) or _counts(draw)):
        return {}
    offsets: dict[int, float] = {}
    if _counts(draw):
        for token_id, times in Counter(draw.log[len(draw.log) - draw.num_generated :]).items():
            offsets[token_id] = -(sampling.presence_penalty + sampling.frequency_penalty * times)
    for token_id, bias in sampling.logit_bias.items():
        offsets[token_id] = offsets.get(token_id, 0.0) + bias
    offsets |= dict.fromkeys(draw.banned, -np.inf)
    in_log = set(draw.log) if _repeats(draw) else set()
    return {each: (int(each in in_log), offsets.get(each, 0.0)) for each in in_log | offsets.keys()}
