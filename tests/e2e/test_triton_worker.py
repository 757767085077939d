"""Whole workers on Triton's kernels, under its interpreter, beside workers of the native and reference ones.

One gateway, a worker each: the ids have to be the others', up to margins that rounding can turn over, and the
log probabilities equal within the numbers' width.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest

import pagecast
from tests.e2e.agreement import assert_ids_agree
from tests.e2e.calls import Api, Reply
from tests.e2e.rig import Rig, running_rig
from tests.tiny_model import write_tiny_gguf

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.triton,
    pytest.mark.skipif(find_spec("triton") is None, reason="the extra `triton` is not installed"),
]
ONCE, REPLAN = pagecast.PLAN_ONCE.value, pagecast.REPLAN.value
PLANS = pytest.mark.parametrize("plan", [ONCE, REPLAN], ids=["plan_once", "replan"])
MAX_TOKENS = 6
MARGIN = 1e-3
FLOAT32 = ("--activations", "float32", "--kv-dtype", "float32")
TRITON = ("--device", "cpu", "--kernels", "triton", "--kv-blocks", "64")
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 2**63 + 5}
TWO_BLOCKS = list(range(40, 57))
THREE_STEPS = [(7 * n) % 250 for n in range(61)]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Three workers of one model, and two of another, quantised one."""
    folder = tmp_path_factory.mktemp("triton")
    sizes = {"seed": 1, "ends": False, "max_context_tokens": 256}
    plain = write_tiny_gguf(folder / "native.gguf", **sizes)
    quantised = write_tiny_gguf(folder / "q8-native.gguf", num_layers=1, formats="Q8_0", **sizes)
    links = {name: folder / f"{name}.gguf" for name in ("triton", "reference", "q8-triton")}
    links["triton"].symlink_to(plain)
    links["reference"].symlink_to(plain)
    links["q8-triton"].symlink_to(quantised)
    models = {
        plain: ("--kernels", "native", *FLOAT32),
        links["reference"]: ("--kernels", "reference"),
        links["triton"]: (*TRITON, "--max-step-tokens", "24", "--max-step-rows", "4"),
        quantised: ("--kernels", "native", *FLOAT32),
        links["q8-triton"]: (*TRITON, "--weights", "file", "--max-step-tokens", "24", "--max-step-rows", "4"),
    }
    with running_rig(folder, models) as rig:
        yield rig


def greedy(api: Api, prompt: Sequence[int], plan: int = ONCE) -> Reply:
    """A greedy turn that tells the two likeliest tokens at each place."""
    with api.session(decode_plan=plan) as session_id:
        return api.turn(session_id, prompt, max_tokens=MAX_TOKENS, sampling={"logprobs": 2})


def margins(reply: Reply) -> list[float]:
    return [token.top[0].logprob - token.top[1].logprob for token in reply.tokens]


def assert_same_distributions(reply: Reply, expected: Reply, tolerance: float) -> None:
    """Log probabilities of the same tokens after the same tokens are the same."""
    pairs = list(zip(reply.tokens, expected.tokens, strict=True))
    assert reply.tokens
    for token, other in pairs:
        theirs = {top.id: top.logprob for top in other.top}
        for top in token.top:
            if top.id in theirs:
                assert top.logprob == pytest.approx(theirs[top.id], abs=tolerance)
        if token.id != other.id:
            return


def started(rig: Rig, name: str) -> dict[str, Any]:
    lines = map(json.loads, rig.workers[name].log_path.read_text().splitlines())
    return next(line for line in lines if line["event"] == "worker_ready")


def test_workers_say_what_they_compute_with(workers: Rig) -> None:
    for name, kind in {"triton": "float32", "q8-triton": "q8_0"}.items():
        ready = started(workers, name)
        found = {key: ready[key] for key in ("device", "kernels", "kernel_set", "weights", "kv_dtype")}
        assert found == {
            "device": "cpu", "kernels": "triton", "kernel_set": "interpreter",
            "weights": kind, "kv_dtype": "float32",
        }  # fmt: skip
        fingerprint = workers.workers[name].info().model.numerics_fingerprint
        assert "/triton-3." in fingerprint
        assert f"/weights-{kind}/products-float32/" in fingerprint


def assert_agrees(
    api: Api, others: Sequence[Api], prompt: Sequence[int], plan: int, tolerance: float
) -> None:
    """Ids and log probabilities of a greedy turn are those of other workers, as far as rounding lets them."""
    mine = greedy(api, prompt, plan)
    # Nothing here needs the host: the device draws, and steps overlap.
    ids = api.said(prompt, session={"decode_plan": plan}, max_tokens=MAX_TOKENS)
    assert ids == mine.ids

    def generate(given: list[int], count: int) -> list[int]:
        if given == prompt:
            return ids
        return api.said(given, session={"decode_plan": plan}, max_tokens=count)

    for other in others:
        expected = greedy(other, prompt, plan)
        assert len(set(expected.ids)) > 3
        assert_same_distributions(mine, expected, tolerance)
        assert_ids_agree(generate, prompt, expected.ids, margins(expected), min_margin=MARGIN)


@PLANS
def test_ids_and_logprobs_are_those_of_native_and_reference(workers: Rig, plan: int) -> None:
    others = [workers.api(name) for name in ("native", "reference")]
    assert_agrees(workers.api("triton"), others, THREE_STEPS, plan, 1e-4)


@PLANS
def test_quantised_weights_are_multiplied_as_the_file_has_them(workers: Rig, plan: int) -> None:
    assert_agrees(workers.api("q8-triton"), [workers.api("q8-native")], TWO_BLOCKS, plan, 1e-3)


def test_a_turns_plan_is_the_one_that_was_asked_for(workers: Rig) -> None:
    api = workers.api("triton")
    for plan, actions in ((ONCE, {"REUSED"}), (REPLAN, {"REPLANNED"})):
        with api.session(decode_plan=plan) as session_id:
            api.turn(session_id, [7], max_tokens=3)
            tokens = workers.workers["triton"].wait_for_tokens(session_id, 3)
        assert {token["plan_action"] for token in tokens} == actions
        assert all(token["launches"] > 0 for token in tokens)


def test_two_sessions_at_once_say_in_two_turns_what_each_says_alone(workers: Rig) -> None:
    turns = {ONCE: ([5, 6, 7], [8]), REPLAN: (list(range(100, 119)), [3, 4])}

    def talk(api: Api, plan: int) -> list[list[int]]:
        with api.session(decode_plan=plan) as session_id:
            return [api.turn(session_id, part, max_tokens=3).ids for part in turns[plan]]

    triton = workers.api("triton")
    alone = [talk(triton, plan) for plan in turns]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda plan: talk(triton, plan), turns))
    # Of one worker bit for bit, so without margins.
    assert together == alone
    assert together == [talk(workers.api("native"), plan) for plan in turns]


def test_a_seeded_turn_draws_the_same_in_both_plans_and_on_the_host(workers: Rig) -> None:
    drawn = {
        (name, plan): workers.api(name).said(
            TWO_BLOCKS,
            session={"decode_plan": plan},
            max_tokens=MAX_TOKENS,
            sampling=SAMPLED,
            stop={"ignore_eos": True},
        )
        for name in ("triton", "reference")
        for plan in (ONCE, REPLAN)
    }
    assert len({tuple(ids) for ids in drawn.values()}) == 1
    assert drawn["reference", ONCE] != workers.api("reference").said(TWO_BLOCKS, max_tokens=MAX_TOKENS)


@PLANS
def test_a_cancelled_turn_is_rolled_back_and_the_session_goes_on(workers: Rig, plan: int) -> None:
    api = workers.api("triton")
    with api.session(decode_plan=plan) as session_id:
        first = api.turn(session_id, [5, 6, 7], max_tokens=2).ids
        before = api.get(session_id)
        stream = api.stream(session_id, [8, 9], max_tokens=200)
        api.cancel(session_id, stream.read_tokens(2))
        assert stream.reply().end == "CANCELLED"
        after = api.get(session_id)
        assert (after.revision, after.num_tokens) == (before.revision, before.num_tokens)
        ids = api.turn(session_id, [8], max_tokens=3).ids
    native = workers.api("native")
    with native.session() as session_id:
        assert native.turn(session_id, [5, 6, 7], max_tokens=2).ids == first
        assert native.turn(session_id, [8], max_tokens=3).ids == ids


def test_blocks_are_given_back(workers: Rig) -> None:
    for name in ("triton", "q8-triton"):
        assert workers.workers[name].num_free == 64
