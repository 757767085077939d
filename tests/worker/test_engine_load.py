"""The engine thread over a real tiny model: many sessions, small pools, storms of cancels and closes."""

import random

import pytest

from tests.worker.engine_harness import Harness, token_ids
from worker import commands
from worker.batch import Batch, Event, Finished
from worker.model.weights.gguf import GgufFile
from worker.scheduler import PagedSessionScheduler

SESSIONS = 32
TURNS = 3
INPUT, OUTPUT = 12, 5
ROUNDS = 1000


def talk(harness: Harness) -> dict[str, list[list[int]]]:
    """Three turns on each of 32 sessions, all at once; tokens of each turn."""
    said: dict[str, list[list[int]]] = {}
    for number in range(SESSIONS):
        harness.open(f"s{number}")
    for turn in range(TURNS):
        futures = []
        for number in range(SESSIONS):
            name, ids = f"s{number}", tuple((7 * number + 31 * turn + place) % 250 for place in range(INPUT))
            base = harness.engine.turn_base(name)
            futures.append(harness.engine.post(harness.submit_command(name, ids, base, max_tokens=OUTPUT)))
        for future in futures:
            future.result(timeout=30)
        for name, events in harness.collect(turns=SESSIONS).items():
            said.setdefault(name, []).append(token_ids(events))
    return said


def test_s14_a_pool_of_a_quarter_gives_the_tokens_of_a_big_one(
    file: GgufFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = SESSIONS * -(-TURNS * (INPUT + OUTPUT) // 16)
    real, empty = PagedSessionScheduler.schedule, []

    def watched(self: PagedSessionScheduler) -> Batch:
        batch = real(self)
        empty.extend([batch] if not batch.rows else [])
        return batch

    monkeypatch.setattr(PagedSessionScheduler, "schedule", watched)
    said, steps = [], []
    for num_blocks in (needed, needed // 4):
        harness = Harness(file, num_blocks)
        harness.start()
        said.append(talk(harness))
        for number in range(SESSIONS):
            harness.ask(commands.CloseSession(f"s{number}"))
        assert harness.engine.num_free_blocks == num_blocks
        harness.stop()
        steps.append(harness.engine.num_steps)
    assert said[0] == said[1]
    assert all(len(tokens) == OUTPUT for turns in said[0].values() for tokens in turns)
    assert empty == []
    assert steps[1] > steps[0]  # the small pool did make turns wait or be computed again


@pytest.mark.parametrize("seed", range(2))
def test_s05_s06_storms_of_cancels_and_closes_leave_the_pool_exact(file: GgufFile, seed: int) -> None:
    """Rounds of open, turn, cancel and close, with a few sessions that stay, in a pool that is too small."""
    chance = random.Random(seed)
    harness = Harness(file, num_blocks=24)
    harness.start()
    stays = [f"stays{number}" for number in range(3)]
    for name in stays:
        harness.open(name)
    for number in range(ROUNDS):
        name = f"s{number}"
        harness.open(name)
        futures = []
        base = harness.engine.turn_base(name)
        for _ in range(chance.randrange(1, 3)):
            ids = tuple(chance.randrange(3, 250) for _ in range(chance.randrange(1, 60)))
            futures.append(
                harness.engine.post(
                    harness.submit_command(
                        name,
                        ids,
                        base,
                        max_tokens=chance.randrange(1, 30),
                        keep=chance.random() < 0.5,
                        appends_only=chance.random() < 0.2,
                        priority=chance.randrange(-1, 2),
                    )
                )
            )
            if chance.random() < 0.7:
                futures.append(harness.engine.post(commands.Cancel(name, f"g-{name}")))
        kept = chance.choice(stays)
        if harness.view(kept).num_tokens > 200:
            harness.ask(commands.CloseSession(kept))
            harness.open(kept)
        futures.append(harness.engine.post(commands.Cancel(kept, f"g-{kept}")))
        harness.engine.post(
            harness.submit_command(kept, (number % 250,), harness.engine.turn_base(kept), keep=True)
        )
        futures.append(harness.engine.post(commands.CloseSession(name)))
        for future in futures:
            future.exception(timeout=30)
    for name in stays:
        harness.engine.post(commands.Cancel(name, f"g-{name}")).exception(timeout=30)
    for name in stays:
        said = said_by(harness, name, (9,))
        log = harness.session(name).token_ids
        harness.open(f"copy-{name}")
        assert said_by(harness, f"copy-{name}", tuple(log[: -len(said)])) == said
        for done in (name, f"copy-{name}"):
            harness.ask(commands.CloseSession(done))
    assert harness.engine.num_free_blocks == 24
    assert harness.scheduler._sessions == {}
    harness.stop()


def said_by(harness: Harness, name: str, ids: tuple[int, ...]) -> list[int]:
    """Tokens of one more turn, whatever else there still is to tell."""
    harness.submit(name, ids, generation_id=f"last-{name}", max_tokens=3)
    events: list[Event] = []
    while not events or not isinstance(events[-1], Finished):
        event = harness.events.get(timeout=30)
        events += [event] if event.generation_id == f"last-{name}" else []
    return token_ids(events)
