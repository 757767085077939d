"""Entries that follow a log are those that its whole log has, whatever became of it in between."""

from dataclasses import replace

import numpy as np
import pytest

from tests.worker.kernels.sample_cases import NOT_BANNED, any_sampling
from worker.batch import UNKNOWN_TOKEN
from worker.params import Sampling
from worker.plan import log_entries
from worker.plan.draw_params import entries_of
from worker.plan.log_entries import LogEntries
from worker.sampling import Draw

PENALISED = Sampling(
    repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={7: 2.0, 99: -1.0}
)


def rows_of(entries):
    """Entries as bytes, in the order of ids: -0.0 differs from 0.0."""
    return sorted(entry.tobytes() for entry in entries)


def check(entries: LogEntries, draw: Draw) -> None:
    found = entries.entries(draw)
    assert rows_of(found) == rows_of(entries_of(draw))
    assert len({int(each[0]) for each in found}) == len(found)


@pytest.fixture
def counted(monkeypatch):
    """How often a whole log was walked."""
    walks = []

    def watched(draw):
        walks.append(len(draw.log))
        return entries_of(draw)

    monkeypatch.setattr(log_entries, "entries_of", watched)
    return walks


@pytest.mark.parametrize(
    "sampling",
    [
        PENALISED,
        Sampling(repetition_penalty=1.5),
        Sampling(presence_penalty=-0.5),
        Sampling(frequency_penalty=0.3, logit_bias={3: 1.0}),
        Sampling(logit_bias={3: 1.0}),
    ],
)
def test_a_growing_log_is_walked_once(counted, sampling):
    random = np.random.default_rng(1)
    entries = LogEntries()
    log = random.integers(0, 40, 30).tolist()
    for step in range(300):
        check(entries, Draw(sampling, log, step, NOT_BANNED))
        if step % 7 == 0:
            check(entries, Draw(sampling, log, step, NOT_BANNED))
        log.append(int(random.integers(0, 200)))
    assert counted == [30]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_becomes_of_a_log(counted, seed):
    """Turns that are rolled back and come again under the same parameters, bans, other parameters."""
    random = np.random.default_rng(seed)
    samplings = [PENALISED, replace(PENALISED), any_sampling(random, 50), any_sampling(random, 50)]
    entries = LogEntries()
    log: list[int] = []
    start, sampling = 0, PENALISED
    for _ in range(300):
        act = random.integers(0, 12)
        if act == 0:
            sampling = samplings[random.integers(0, 4)]
        elif act == 1:
            del log[random.integers(0, len(log) + 1) :]
            start = min(start, len(log))
        elif act == 2:
            start = int(random.integers(0, len(log) + 1))
        elif act == 3 and log:
            log[random.integers(0, len(log))] = int(random.integers(0, 60))
        elif act == 4:
            log = log[:]
        else:
            log.append(int(random.integers(0, 60)))
        banned = frozenset({1, 4, 70}) if random.integers(0, 8) == 0 else NOT_BANNED
        draw = Draw(sampling, log if act != 5 else tuple(log), len(log) - start, banned)
        check(entries, draw)
    assert 10 < len(counted) < 250


def test_a_token_that_is_not_known_is_refused_and_the_next_is_whole():
    entries = LogEntries()
    check(entries, Draw(PENALISED, [5, 6], 1, NOT_BANNED))
    with pytest.raises(ValueError, match="not known yet"):
        entries.entries(Draw(PENALISED, [5, 6, 7, UNKNOWN_TOKEN], 3, NOT_BANNED))
    check(entries, Draw(PENALISED, [5, 6, 7, 7], 3, NOT_BANNED))
    check(entries, Draw(PENALISED, [5, 6, 7, 7, 8], 4, NOT_BANNED))
