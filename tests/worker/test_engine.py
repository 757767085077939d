"""The engine thread over a real tiny model: turns, batches, plan modes."""

from tests.worker.engine_harness import Harness, token_ids
from worker import commands
from worker.batch import DecodePlan, Finished, FinishReason, Started, TokenDrawn
from worker.model.weights.gguf import GgufFile


def test_a_turn_tells_its_start_its_tokens_and_its_end(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", tuple(range(40)), max_tokens=5)
    started, *tokens, finished = harness.collect()["g-a"]
    assert isinstance(started, Started)
    assert started.usage.input_tokens == 40
    assert [token.number for token in tokens if isinstance(token, TokenDrawn)] == [0, 1, 2, 3, 4]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.revision) == (FinishReason.MAX_TOKENS, 1)
    assert (finished.plan_counters.builds, finished.plan_counters.reuses) == (1, 5)
    texts = [event.text for event in (*tokens, finished) if isinstance(event, TokenDrawn | Finished)]
    whole = b"".join(harness.tokenizer.token_bytes(token) for token in token_ids(tokens))
    assert "".join(texts) == whole.decode("utf-8", errors="replace")


def test_s20_eight_turns_at_once_yield_what_each_yields_alone(file: GgufFile) -> None:
    prompts = {f"s{n}": tuple((7 * n + k) % 250 for k in range(3 + 9 * n)) for n in range(8)}
    alone = {}
    for name, ids in prompts.items():
        harness = Harness(file)
        harness.start()
        harness.open(name)
        harness.submit(name, ids, max_tokens=12)
        alone[name] = token_ids(harness.collect()[f"g-{name}"])
        harness.engine.stop()
    together = Harness(file, num_blocks=24)
    together.start()
    for number, (name, ids) in enumerate(prompts.items()):
        together.open(name, DecodePlan.REPLAN if number % 2 else DecodePlan.PLAN_ONCE)
        together.submit(name, ids, max_tokens=12)
    events = together.collect(turns=8)
    together.engine.stop()
    assert {name: token_ids(events[f"g-{name}"]) for name in prompts} == alone


def test_s03_s32_a_cancelled_turn_never_happened(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", tuple(range(20)), max_tokens=3)
    harness.collect()
    before = harness.ask(commands.GetSession("a"))
    free = harness.engine.num_free_blocks
    harness.submit("a", tuple(range(100)), max_tokens=400)
    steps = harness.engine.num_steps
    harness.ask(commands.Cancel("a", "g-a"))
    finished = harness.collect()["g-a"][-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.revision) == (FinishReason.CANCELLED, 1)
    after = harness.ask(commands.GetSession("a"))
    assert (after.num_tokens, after.num_computed, after.num_kv_blocks) == (
        before.num_tokens,
        before.num_computed,
        before.num_kv_blocks,
    )
    assert harness.engine.num_free_blocks == free
    assert harness.engine.num_steps - steps <= 2
    harness.submit("a", (9,), max_tokens=4)
    after_cancel = token_ids(harness.collect()["g-a"])
    harness.open("b")
    harness.submit("b", tuple(range(20)), max_tokens=3)
    harness.collect()
    harness.submit("b", (9,), max_tokens=4)
    assert token_ids(harness.collect()["g-b"]) == after_cancel


def test_a_cancel_that_keeps_commits_what_there_is(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", (1, 2, 3), max_tokens=400, keep=True)
    while not isinstance(harness.events.get(timeout=30), TokenDrawn):
        pass
    harness.ask(commands.Cancel("a", "g-a"))
    finished = harness.collect()["g-a"][-1]
    assert isinstance(finished, Finished)
    view = harness.ask(commands.GetSession("a"))
    assert (view.revision, view.num_tokens) == (1, 3 + finished.usage.output_tokens)


def test_the_plan_mode_may_change_at_any_token(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", (5, 6, 7), max_tokens=300)
    modes = []
    for plan in (DecodePlan.REPLAN, DecodePlan.PLAN_ONCE, DecodePlan.REPLAN):
        harness.ask(commands.UpdateSession("a", None, plan, {}))
        while True:
            event = harness.events.get(timeout=30)
            if isinstance(event, TokenDrawn) and event.plan is plan:
                modes.append(event.result.plan_action.name)
                break
    assert modes == ["REPLANNED", "REUSED", "REPLANNED"]
    harness.ask(commands.CloseSession("a"))
