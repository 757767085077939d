"""Runners over a device that delays: steps launched ahead of what is read, draws on the device."""

import pytest
import torch

from tests.worker.numerics import bits
from tests.worker.plan.device_cases import DelayDevice, DelayMark, device_runner
from tests.worker.plan.device_sessions import GREEDY, Session, four_sessions, launch, read
from tests.worker.plan.plan_cases import pool_of, row_of
from worker.batch import Batch, PlanAction
from worker.params import Sampling
from worker.runner import Runner
from worker.sampling import Draw


@pytest.fixture
def sessions() -> list[Session]:
    return four_sessions()


def generate(runner: Runner, sessions: list[Session], *, num_steps: int, ahead: bool) -> list[list[int]]:
    """Prefill one after the other while the others decode; then all."""
    unread = None
    for number in range(num_steps):
        joined = sessions[: number + 1]
        for members in (
            [session for session in joined if session.num_computed >= session.num_input],
            [session for session in joined if session.num_computed < session.num_input],
        ):
            if members:
                step = launch(runner, members)
                if unread is not None:
                    read(unread)
                unread = step
                if not ahead:
                    read(unread)
                    unread = None
    if unread is not None:
        read(unread)
    return [session.log for session in sessions]


def test_tokens_are_those_of_the_host_however_far_it_is_behind(monkeypatch, tiny_llama, sessions):
    def fresh() -> list[Session]:
        return [Session(each.name, each.log, each.blocks, each.sampling) for each in sessions]

    host = Runner(tiny_llama, pool_of(tiny_llama), kernels="reference", max_step_tokens=64, max_step_rows=8)
    expected = generate(host, fresh(), num_steps=30, ahead=False)
    device = DelayDevice()
    runner = device_runner(monkeypatch, tiny_llama, pool_of(tiny_llama), device)
    assert generate(runner, fresh(), num_steps=30, ahead=True) == expected
    other = device_runner(monkeypatch, tiny_llama, pool_of(tiny_llama))
    assert generate(other, fresh(), num_steps=30, ahead=False) == expected
    assert runner.has_token_classes
    assert (runner.builds, runner.replans) == (2, 0)
    assert device.num_replays > 20
    assert not host.has_token_classes
    assert not host.runs_ahead([])


def test_a_launch_does_not_wait_and_a_read_waits_for_its_own_step(monkeypatch, tiny_llama, sessions):
    device = DelayDevice()
    runner = device_runner(monkeypatch, tiny_llama, pool_of(tiny_llama), device)
    runner.warm_up()  # what builds a plan waits
    device.num_runs = 0
    first = launch(runner, sessions[:2])
    assert device.num_runs == 0
    assert device.num_waiting == 3  # inputs, launches, ids
    second = launch(runner, sessions[:2])
    assert device.num_runs == 0
    read(first)
    assert device.num_runs == 1
    assert device.num_waiting == 3
    read(second)
    assert (device.num_runs, device.num_waiting) == (2, 0)


def test_no_third_step_is_launched_and_a_step_is_read_once(monkeypatch, tiny_llama, sessions):
    runner = device_runner(monkeypatch, tiny_llama, pool_of(tiny_llama))
    first = launch(runner, sessions[:1])
    second = launch(runner, sessions[:1])
    with pytest.raises(RuntimeError, match="2 steps are launched and not read"):
        runner.launch(Batch((sessions[1].row(),)), [sessions[1].draw()])
    assert read(first) != []
    with pytest.raises(RuntimeError, match="read once"):
        first[1].read()
    read(second)


@pytest.mark.parametrize("broken", [False, True])
def test_host_memory_is_not_written_while_a_copy_reads_it(monkeypatch, tiny_llama, broken):
    """The guard broken: what is not waited for is overwritten, and the first steps' KV is never stored."""
    if broken:
        monkeypatch.setattr("worker.plan.staging._Buffer.take", lambda self: None)
    # More in flight than there may be: it is the buffers that are looked at.
    monkeypatch.setattr("worker.plan.device_policy.MAX_IN_FLIGHT", 9)
    kv = pool_of(tiny_llama, fill=0.0)
    runner = device_runner(monkeypatch, tiny_llama, kv)
    steps = [
        runner.launch(Batch((row_of(f"s{place}", 3, 0, (20 + place,), wants_logits=False),)), [])
        for place in range(4)
    ]
    for step in steps:
        step.read()
    stored = [bool(kv.data[20 + place].any()) for place in range(4)]
    assert stored == ([False, False, True, True] if broken else [True] * 4)


def test_four_bytes_a_row_come_back_and_one_copy_goes(monkeypatch, tiny_llama, sessions):
    device = DelayDevice()
    runner = device_runner(monkeypatch, tiny_llama, pool_of(tiny_llama), device)
    read(launch(runner, sessions[:3]))
    device.copies.clear()
    drawing, launched = launch(runner, sessions[:3])
    results = launched.read().results
    sent, back = device.copies
    assert back == 4 * len(drawing)
    assert {result.host_bytes for result in results} == {sent + back}
    assert sent < 3 * 160 + 128
    assert [result.batch_size for result in results] == [3, 3, 3]
    assert results[0].plan_action is PlanAction.BUILT
    assert results[0].step_ns > 0
    assert results[0].kernel_ns == 0


def test_draws_that_the_device_does_not_make_are_made_by_the_host_alike(monkeypatch, tiny_llama, sessions):
    device = DelayDevice()
    runner = device_runner(monkeypatch, tiny_llama, pool_of(tiny_llama), device)
    host = Runner(tiny_llama, pool_of(tiny_llama), kernels="reference", max_step_tokens=64, max_step_rows=8)
    samplings = [
        Sampling(temperature=0.8, seed=5, logprobs=3),
        Sampling(temperature=0.8, seed=6, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=0),
        Sampling(logit_bias={5: 40.0, 6: -3.0}),
        Sampling(temperature=1.1, seed=8),
    ]
    rows = tuple(row_of(name, 9, 0, (place,)) for place, name in enumerate("abcd"))
    draws = [
        Draw(sampling, rows[place].token_ids, 4, frozenset({place + 1}))
        for place, sampling in enumerate(samplings)
    ]
    mine, theirs = (each.launch(Batch(rows), draws).read() for each in (runner, host))
    for one, other in zip(mine.drawn, theirs.drawn, strict=True):
        assert one.token_id == other.token_id
        assert len(one.top) == len(other.top)
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    vocab_bytes = 4 * tiny_llama.config.vocab_size
    assert device.copies[-1] == vocab_bytes  # of the one row that wants a list
    assert device.copies[-2] == device.copies[-3] == 4 * 4  # logprobs, ids
    assert [runner.runs_ahead([draw]) for draw in draws] == [False, False, True, True]


def test_a_row_without_a_token_is_told(monkeypatch, tiny_llama):
    kv = pool_of(tiny_llama, fill=0.0)
    runner = device_runner(monkeypatch, tiny_llama, kv)
    vocab = range(tiny_llama.config.vocab_size)
    rows = (row_of("a", 3, 0, (1,)), row_of("b", 3, 0, (2,)))
    draws = [
        Draw(GREEDY, rows[0].token_ids, 0, frozenset(vocab)),
        Draw(GREEDY, rows[1].token_ids, 0, frozenset()),
    ]
    first, second = runner.launch(Batch(rows), draws).read().drawn
    assert first is None
    assert second is not None


def test_warm_up_captures_every_bucket_and_writes_no_kv(monkeypatch, tiny_llama):
    device = DelayDevice()
    kv = pool_of(tiny_llama)
    before = kv.data.clone()
    runner = device_runner(monkeypatch, tiny_llama, kv, device)
    runner.warm_up()
    assert device.num_captures == 2 * len([1, 2, 4, 8, 16, 32, 64])
    assert torch.equal(bits(kv.data), bits(before))
    assert (runner.builds, runner.reuses, runner.replans) == (2, 0, 0)
    step = runner.run(Batch((row_of("a", 5),)))
    assert step.results[0].plan_action is PlanAction.REUSED
    assert device.num_replays == 1


def test_marks_are_waited_for_in_order(monkeypatch, tiny_llama, sessions):
    """Reading out of order is fine for the one read, and the other one has landed by then."""
    runner = device_runner(monkeypatch, tiny_llama, pool_of(tiny_llama))
    runner.warm_up()
    waited: list[int] = []
    real = DelayMark.wait
    monkeypatch.setattr(DelayMark, "wait", lambda self: (waited.append(self._place), real(self))[1])
    first, second = launch(runner, sessions[:1]), launch(runner, sessions[2:3])
    read(second)
    read(first)
    assert waited[-2] > waited[-1]
