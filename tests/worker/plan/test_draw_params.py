"""Draws as words: what is written for the device, and which draws it may make."""

import struct
from dataclasses import replace

import numpy as np
import pytest

from worker.batch import UNKNOWN_TOKEN
from worker.kernels.draw_words import (
    DRAW_WORDS,
    DRAWS,
    ENTRY_WORDS,
    GREEDY,
    IN_LOG,
    OFFSET,
    TOKEN_ID,
    WANTS_LOGPROB,
)
from worker.params import Sampling
from worker.plan.draw_params import MAX_ENTRIES, fits_device, runs_ahead, write
from worker.plan.staging_layout import StagingLayout, unknown_token
from worker.sampling import Draw

NONE: frozenset[int] = frozenset()


def tables(room: int = 8) -> tuple[np.ndarray, np.ndarray]:
    return np.full(DRAW_WORDS, -1, np.int32), np.full((room, ENTRY_WORDS), -9, np.int32)


def entries_of(draw: Draw) -> dict[int, tuple[int, float]]:
    words, entries = tables(64)
    count = write(draw, words, entries, slot=0, first_entry=0)
    assert (entries[count:] == -9).all()
    found = {
        int(row[TOKEN_ID]): (int(row[IN_LOG]), float(row[OFFSET : OFFSET + 2].view(np.float64)[0]))
        for row in entries[:count]
    }
    assert len(found) == count, "an id twice"
    return found


def test_words_of_a_draw():
    sampling = Sampling(
        0.7, top_k=40, top_p=0.9, min_p=0.05, seed=2**64 - 2, repetition_penalty=1.1, logprobs=0
    )
    words, entries = tables()
    count = write(Draw(sampling, [5, 6, 5], 1, NONE), words, entries, slot=3, first_entry=17)
    assert count == 2
    flags, slot, first, number, top_k, position, seed, *floats = struct.unpack("<6iQ2f3d", words.tobytes())
    assert flags == DRAWS | WANTS_LOGPROB
    assert (slot, first, number, top_k, position, seed) == (3, 17, 2, 40, 3, 2**64 - 2)
    assert floats[:2] == [np.float32(0.7), np.float32(0.05)]
    assert floats[2:] == [0.9, 1.1, 1 / 1.1]


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0.0, True), (1e-4, True), (2e-4, False)])
def test_a_temperature_next_to_zero_is_greedy(temperature, is_greedy):
    words, entries = tables()
    assert write(Draw(Sampling(temperature), [], 0, NONE), words, entries, slot=0, first_entry=0) == 0
    assert words[0] == DRAWS | (GREEDY if is_greedy else 0)
    assert (entries == -9).all()


def test_top_k_beyond_any_vocabulary_fits_its_word():
    words, entries = tables()
    write(Draw(Sampling(1.0, top_k=2**32 - 1), [], 0, NONE), words, entries, slot=0, first_entry=0)
    assert words[4] == 2**31 - 1


def test_entries_are_penalties_bias_and_bans_of_each_id_once():
    sampling = Sampling(
        1.0,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={7: 2.0, 9: -1.0},
    )
    draw = Draw(sampling, [1, 2, 7, 7, 2], num_generated=3, banned=frozenset({2, 11}))
    assert entries_of(draw) == {
        1: (1, 0.0),
        2: (1, -np.inf),
        7: (1, -(0.5 + 0.25 * 2) + 2.0),
        9: (0, -1.0),
        11: (0, -np.inf),
    }
    assert entries_of(draw._replace(num_generated=0))[7] == (1, 2.0)
    no_repetition = replace(sampling, repetition_penalty=1.0)
    assert entries_of(draw._replace(sampling=no_repetition)).keys() == {2, 7, 9, 11}


def test_a_refused_draw_writes_nothing():
    words, entries = tables(room=1)
    draw = Draw(Sampling(logit_bias={1: 1.0, 2: 1.0}), [], 0, NONE)
    with pytest.raises(ValueError, match="entries has room for 1, the draw has 2"):
        write(draw, words, entries, slot=0, first_entry=0)
    words_after, entries_after = tables(room=1)
    unknown = Draw(Sampling(repetition_penalty=1.2), [UNKNOWN_TOKEN], 1, NONE)
    with pytest.raises(ValueError, match=r"draw\.log"):
        write(unknown, words, entries, slot=0, first_entry=0)
    assert (words == words_after).all()
    assert (entries == entries_after).all()


@pytest.mark.parametrize(
    ("sampling", "fits", "ahead"),
    [
        (Sampling(), True, True),
        (Sampling(1.0, top_k=3, top_p=0.5, min_p=0.1, logit_bias={3: 1.0}, logprobs=0), True, True),
        (Sampling(logprobs=1), False, False),
        (Sampling(repetition_penalty=1.1), True, False),
        (Sampling(presence_penalty=-0.1), True, False),
        (Sampling(frequency_penalty=0.1), True, False),
    ],
)
def test_what_a_device_draws_and_what_runs_ahead(sampling, fits, ahead):
    draw = Draw(sampling, [1, 2, 3], 2, frozenset({4}))
    assert fits_device(draw) is fits
    assert runs_ahead(draw) is ahead


def test_a_log_counts_by_its_distinct_ids():
    repeats = Sampling(repetition_penalty=1.1)
    assert fits_device(Draw(repeats, [1, 2] * MAX_ENTRIES, 0, NONE))
    assert fits_device(Draw(repeats, range(MAX_ENTRIES), 0, NONE))
    assert not fits_device(Draw(repeats, range(MAX_ENTRIES), 0, frozenset({MAX_ENTRIES})))
    assert fits_device(Draw(Sampling(), range(MAX_ENTRIES + 9), 0, NONE))
    counts = Sampling(presence_penalty=1.0)
    assert not fits_device(Draw(counts, range(MAX_ENTRIES + 1), MAX_ENTRIES + 1, NONE))
    assert fits_device(Draw(counts, range(MAX_ENTRIES + 1), 5, NONE))


def test_sections_of_a_layout_are_aligned_and_apart():
    layout = StagingLayout(5, 3, 2, 7)
    sizes = {
        "header": 4,
        "token_ids": 5,
        "position": 5,
        "slot_mapping": 5,
        "query_start": 4,
        "context_len": 3,
        "row_slot": 3,
        "update_first": 3,
        "update_start": 4,
        "logits_index": 2,
        "draws": 2 * DRAW_WORDS,
        "updates": 7,
    }
    end = 0
    for name, size in sizes.items():
        offset = getattr(layout, name)
        assert offset % 4 == 0
        assert offset >= end, name
        end = offset + size
    assert end <= layout.num_words < end + 4
    assert [unknown_token(slot) for slot in (0, 5)] == [-1, -6]


@pytest.mark.parametrize("name", ["num_tokens", "num_rows", "num_logits", "max_updates"])
def test_a_layout_without_room_is_refused(name):
    sizes = {"num_tokens": 1, "num_rows": 1, "num_logits": 1, "max_updates": 0}
    StagingLayout(**sizes)
    with pytest.raises(ValueError, match=f"^{name}=-1"):
        StagingLayout(**(sizes | {name: -1}))
