"""What a device's runner refuses, what fails, and slots that change hands: no later step is wrong."""

import random

import numpy as np
import pytest
import torch

from tests.worker.plan.device_cases import DelayDevice, TwinLaunchers, device_runner
from tests.worker.plan.device_sessions import Session, four_sessions, launch, read
from tests.worker.plan.plan_cases import pool_of, row_of
from worker.batch import UNKNOWN_TOKEN, Batch, DecodePlan, Row
from worker.plan.rows import StepTooLarge
from worker.runner import Runner


@pytest.fixture
def sessions() -> list[Session]:
    return four_sessions()


REFUSED = [
    ((row_of("a", 65, blocks=range(5)),), "tokens: wanted 65"),
    ((row_of("a"), row_of("a", blocks=(9,))), "has a row in this step already"),
    ((row_of("a", blocks=(64,)),), "block outside"),
    ((Row("z", (5, UNKNOWN_TOKEN), 0, (1,), True, DecodePlan.PLAN_ONCE),), "id outside"),
    ((Row("a", (UNKNOWN_TOKEN, 5), 21, (10, 11), True, DecodePlan.PLAN_ONCE),), "id outside"),
    ((), "rows is empty"),
]


@pytest.mark.parametrize("plan", DecodePlan)
@pytest.mark.parametrize(("rows", "message"), REFUSED)
def test_a_refused_step_changes_nothing(monkeypatch, tiny_llama, sessions, rows, message, plan):
    device = DelayDevice()
    runner = device_runner(monkeypatch, tiny_llama, pool_of(tiny_llama), device)
    unread = launch(runner, sessions[:2])
    slots = runner._device._shared[1].slots
    before = (slots.tables.copy(), dict(slots._slots), device.num_waiting, runner.builds)
    rows = tuple(row._replace(plan=plan) for row in rows)
    draws = [sessions[0].draw() for row in rows if row.wants_logits]
    with pytest.raises(ValueError, match=message) as caught:
        runner.launch(Batch(rows), draws)
    assert isinstance(caught.value, StepTooLarge) == ("wanted" in message)
    after = (slots.tables.copy(), dict(slots._slots), device.num_waiting, runner.builds)
    assert np.array_equal(before[0], after[0])
    assert before[1:] == after[1:]
    read(unread)


def test_wrong_companies_are_refused(monkeypatch, tiny_llama, sessions):
    runner = device_runner(monkeypatch, tiny_llama, pool_of(tiny_llama))
    rows = (row_of("a"), sessions[1].row())
    with pytest.raises(ValueError, match="several token classes"):
        runner.run(Batch(rows))
    with pytest.raises(ValueError, match="draws has 0, the batch has 1"):
        runner.launch(Batch((row_of("a"),)), [])
    with pytest.raises(ValueError, match="vocab_size=0"):
        device_runner(monkeypatch, tiny_llama, pool_of(tiny_llama), vocab_size=0)


@pytest.mark.parametrize("fails_at", [1, 5, 20])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_failed_launch_harms_no_later_step(monkeypatch, tiny_llama, sessions, fails_at, ahead):
    """What fails fails at once here: the twins are called where they are asked."""

    class Eager(DelayDevice):
        def run(self, launches):
            self.finish(self._num_asked)
            super().run(launches)
            self.finish(self._num_asked)

    def tokens(*, failing: bool) -> list[list[int]]:
        mine = [Session(each.name, each.log, each.blocks, each.sampling) for each in sessions]
        twins = TwinLaunchers()
        runner = device_runner(monkeypatch, tiny_llama, pool_of(tiny_llama), Eager(), twins)
        for session in mine:
            read(launch(runner, [session]))
        unread = launch(runner, mine[:2]) if ahead else None
        if failing:
            twins.fails_at = fails_at
            others = (row_of("x", 2, 0, (1, 5)), row_of("y", 1, 0, (3,)))
            with pytest.raises(RuntimeError, match="a launch failed"):
                runner.launch(Batch(others), [mine[3].draw()] * 2)
            twins.fails_at = None
        if unread is not None:
            after = launch(runner, mine[:2])
            read(unread)
            read(after)
        for _ in range(18):
            read(launch(runner, mine))
        return [session.log for session in mine]

    assert tokens(failing=True) == tokens(failing=False)


def test_slots_are_taken_over_and_come_back(monkeypatch, tiny_llama):
    """More sessions than slots, in random company, contexts that grow and start anew in other blocks."""
    rng = random.Random(5)
    kv, host_kv = pool_of(tiny_llama, num_blocks=128), pool_of(tiny_llama, num_blocks=128)
    device = DelayDevice()
    runner = device_runner(monkeypatch, tiny_llama, kv, device, max_step_rows=3, max_step_tokens=40)
    host = Runner(tiny_llama, host_kv, kernels="reference", max_step_tokens=40, max_step_rows=3)
    free = list(range(128))
    rng.shuffle(free)
    computed: dict[str, int] = {}
    blocks: dict[str, list[int]] = {}
    for number in range(60):
        rows = []
        for name in rng.sample("abcdefghijkl", rng.randint(1, 3)):
            if computed.get(name, 99) > 60:
                free = free + blocks.get(name, [])
                blocks[name], computed[name] = [], 0
            count = rng.choice((1, 1, 7, 13))
            while len(blocks[name]) * 16 < computed[name] + count:
                blocks[name].append(free.pop(0))
            rows.append(row_of(name, count, computed[name], tuple(blocks[name])))
            computed[name] += count
        step, expected = (each.run(Batch(tuple(rows))) for each in (runner, host))
        torch.testing.assert_close(step.logits, expected.logits, rtol=0, atol=1e-4, msg=str(number))


def test_a_table_that_grows_by_more_than_fits_is_copied_whole(monkeypatch, tiny_llama):
    device = DelayDevice()
    kv = pool_of(tiny_llama, num_blocks=600)
    runner = device_runner(monkeypatch, tiny_llama, kv, device, max_step_rows=8)
    host = Runner(
        tiny_llama,
        pool_of(tiny_llama, num_blocks=600),
        kernels="reference",
        max_step_tokens=64,
        max_step_rows=8,
    )
    tables = [tuple(range(64 * place, 64 * place + 64)) for place in range(8)]
    rows = tuple(row_of(str(place), 2, 0, tables[place]) for place in range(8))
    for each in (runner, host):
        each.run(Batch(rows))
    whole = 16 * 64 * 4
    assert whole in device.copies
    device.copies.clear()
    rows = tuple(row_of(str(place), 1, 2, tables[place]) for place in range(8))
    step, expected = (each.run(Batch(rows)) for each in (runner, host))
    torch.testing.assert_close(step.logits, expected.logits, rtol=0, atol=1e-4)
    assert whole not in device.copies
