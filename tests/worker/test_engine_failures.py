"""The engine thread over a real tiny model: what fails, fails alone and leaves nothing behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tiny_gguf
from tests.worker.engine_harness import Harness, HeldSteps, before_launches, failed, finished, token_ids
from worker import commands, sampling
from worker.batch import Batch, DecodePlan, Drawn, Failed
from worker.detokenize import Detokenizer
from worker.model.weights.gguf import read_gguf
from worker.params import Sampling
from worker.scheduler import PagedSessionScheduler
from worker.table import SessionTable

NAN_TOKEN = 200


@pytest.fixture(scope="module")
def nan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("nan") / "tiny.gguf", ends=False, nan_token=NAN_TOKEN)


@pytest.fixture
def nan_harness(nan_path: Path) -> Iterator[Harness]:
    harness = Harness(read_gguf(nan_path))
    harness.start()
    yield harness
    harness.stop()


def break_runs_with(monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """Let every step raise that computes `token`."""

    def broken(batch: Batch) -> None:
        if any(token in row.token_ids for row in batch.rows):
            raise RuntimeError("kernel")

    before_launches(monkeypatch, broken)


def test_s17_bad_logits_fail_their_turn_and_spare_the_neighbours(
    nan_harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = nan_harness
    prompts = {name: tuple(range(start, start + 20)) for name, start in (("x", 3), ("y", 30), ("z", 60))}
    alone = {}
    for name, ids in prompts.items():
        harness.open(name)
        alone[name] = token_ids(harness.run(name, ids, max_tokens=8))
        harness.ask(commands.CloseSession(name))
    for name in (*prompts, "bad"):
        harness.open(name)
    steps = HeldSteps(monkeypatch)
    harness.submit("x", prompts["x"], max_tokens=8)
    steps.started.get(timeout=30)
    beside = {"bad": (5, NAN_TOKEN, 7), "y": prompts["y"], "z": prompts["z"]}
    for name, ids in beside.items():
        harness.engine.post(harness.submit_command(name, ids, harness.engine.turn_base(name), max_tokens=8))
    steps.go_on.set()
    events = harness.collect(turns=4)
    assert {"bad", "x"} <= set(steps.started.get(timeout=30))
    assert failed(events["g-bad"]).reason == "NUMERIC_FAILURE"
    assert token_ids(events["g-bad"]) == []
    assert {name: token_ids(events[f"g-{name}"]) for name in prompts} == alone


def test_s17_a_failed_turn_leaves_no_bad_number_and_a_session_that_works(nan_harness: Harness) -> None:
    harness = nan_harness
    harness.open("a")
    first = token_ids(harness.run("a", tuple(range(20)), max_tokens=3))
    before = harness.view("a")
    assert failed(harness.run("a", (5, NAN_TOKEN, 7), max_tokens=3)).reason == "NUMERIC_FAILURE"
    after = harness.view("a")
    assert (after.revision, after.num_tokens) == (before.revision, before.num_tokens)
    assert (after.num_computed, after.num_kv_blocks) == (0, 0)
    assert harness.engine.num_free_blocks == 64
    assert harness.storage.data.isfinite().all()
    assert harness.storage.data.count_nonzero() == 0
    again = harness.run("a", (9,), max_tokens=4)
    assert finished(again).usage.reprefilled_tokens == 22
    harness.open("b")
    harness.run("b", tuple(range(20)), max_tokens=3)
    assert harness.session("b").token_ids == [*range(20), *first]
    assert token_ids(harness.run("b", (9,), max_tokens=4)) == token_ids(again)


def test_a_step_that_raises_fails_the_row_that_does_and_no_other(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {name: tuple(range(start, start + 5)) for name, start in (("x", 3), ("y", 30))}
    alone = {}
    for name, ids in prompts.items():
        harness.open(f"alone-{name}")
        alone[name] = token_ids(harness.run(f"alone-{name}", ids, max_tokens=20))
    break_runs_with(monkeypatch, 255)
    for name in (*prompts, "bad"):
        harness.open(name, DecodePlan.REPLAN if name == "y" else DecodePlan.PLAN_ONCE)
    steps = HeldSteps(monkeypatch)
    harness.submit("x", prompts["x"], max_tokens=20)
    steps.started.get(timeout=30)
    for name, ids in (("y", prompts["y"]), ("bad", (1, 2, 255))):
        base = harness.engine.turn_base(name)
        harness.engine.post(harness.submit_command(name, ids, base, max_tokens=20))
    steps.go_on.set()
    events = harness.collect(turns=3)
    assert finished(events["g-x"]).usage.output_tokens == 20
    for name in prompts:
        tokens = harness.session(name).token_ids[5:]
        assert tokens == alone[name]
    assert {str(error) for error in harness.errors} == {"kernel"}
    failure = failed(events["g-bad"])
    assert failure.reason == "INTERNAL"
    # The batch's error, then that of the row alone: the caller gets the id of the last.
    assert failure.metadata == {"error_id": harness.error_ids[-1]}
    assert harness.error_ids[-1] in failure.message
    assert "kernel" not in failure.message
    assert len(set(harness.error_ids)) == len(harness.errors) == 2
    assert (harness.view("bad").num_tokens, harness.view("bad").num_kv_blocks) == (0, 0)
    harness.errors.clear()
    assert len(token_ids(harness.run("bad", (1,), max_tokens=2))) == 2


@pytest.mark.parametrize(
    ("owner", "method"),
    [(PagedSessionScheduler, "commit"), (SessionTable, "tell"), (Detokenizer, "push")],
    ids=["commit", "tell", "text"],
)
def test_what_raises_after_the_run_fails_its_turn_alone(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    for name in ("a", "b"):
        harness.open(name)
    harness.run("b", (4,), max_tokens=1)
    harness.submit("a", (1, 2), max_tokens=400)
    harness.wait_for_token()
    real, broken_once = getattr(owner, method), []

    def broken(self: object, *args: object, **kwargs: object) -> object:
        if not broken_once:
            broken_once.append(method)
            raise RuntimeError(method)
        return real(self, *args, **kwargs)

    harness.submit("b", (3,), max_tokens=400)
    monkeypatch.setattr(owner, method, broken)
    events = harness.collect(turns=2)
    ends = [events["g-a"][-1], events["g-b"][-1]]
    assert sorted(type(end).__name__ for end in ends) == ["Failed", "Finished"]
    assert [end.reason for end in ends if isinstance(end, Failed)] == ["INTERNAL"]
    assert [str(error) for error in harness.errors] == [method]
    harness.errors.clear()
    for name in ("a", "b"):
        assert len(token_ids(harness.run(name, (7,), max_tokens=3))) == 3


def test_drawing_that_raises_for_one_row_fails_that_row(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sampling._draw

    def broken(raw: Any, draw: sampling.Draw) -> Drawn | None:
        if draw.log[0] == 77:
            raise ArithmeticError("draw")
        return real(raw, draw)

    monkeypatch.setattr(sampling, "_draw", broken)
    for name in ("a", "b"):
        harness.open(name)
    harness.submit("a", (1, 2), max_tokens=30)
    harness.wait_for_token()
    # A row that wants its likeliest tokens is drawn in Python, whatever the kernels.
    harness.submit("b", (77,), sampling=Sampling(temperature=0.9, seed=1234, logprobs=2))
    events = harness.collect(turns=2)
    assert failed(events["g-b"]).reason == "INTERNAL"
    assert finished(events["g-a"]).usage.output_tokens == 30
    harness.errors.clear()


def test_an_exhausted_pool_fails_the_first_turn_and_the_next_goes_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PagedSessionScheduler.schedule

    def none_while_a_runs(self: PagedSessionScheduler) -> Batch:
        first = self.first_turn()
        return Batch(()) if first is not None and first.session_id == "a" else real(self)

    for name in ("a", "b"):
        harness.open(name)
    monkeypatch.setattr(PagedSessionScheduler, "schedule", none_while_a_runs)
    harness.submit("a", (1,))
    failure = failed(harness.collect()["g-a"])
    assert (failure.reason, dict(failure.metadata)) == ("KV_EXHAUSTED", {"num_free_blocks": "64"})
    assert harness.view("a").num_tokens == 0
    assert len(token_ids(harness.run("b", (1,), max_tokens=2))) == 2


def test_a_bug_outside_of_every_turn_ends_the_thread_and_is_told(
    nan_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: PagedSessionScheduler) -> Batch:
        raise RuntimeError("schedule")

    monkeypatch.setattr(PagedSessionScheduler, "schedule", broken)
    harness = Harness(read_gguf(nan_path))
    harness.start()
    harness.open("a")
    harness.submit("a", (1,))
    with pytest.raises(RuntimeError, match="schedule"):
        harness.engine.ended.result(timeout=30)
    assert [str(error) for error in harness.errors] == ["schedule"]
