"""How turns end and what they are built on, over gRPC: times, policies, revisions, input ahead of a turn."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pagecast.v1 import generation_pb2, session_pb2
from tests.e2e.calls import ENDLESS, GO_ON, Api, Refusal, chat, refusal_of
from tests.e2e.processes import wait_until
from tests.e2e.rig import Rig

pytestmark = pytest.mark.e2e
SAMPLING = {"temperature": 1.0, "seed": 21}
DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED
KEEP = generation_pb2.CANCEL_POLICY_KEEP_PARTIAL


def ns(milliseconds: int) -> dict[str, int]:
    return {"nanos": milliseconds * 1_000_000}


def test_a_time_limit_is_a_committed_end(api: Api) -> None:
    with api.session() as session_id:
        reply = api.turn(
            session_id, [5, 6], max_tokens=ENDLESS, sampling=SAMPLING, stop=GO_ON, time_limit=ns(300)
        )
        assert (reply.end, reply.finished.revision) == ("TIME_LIMIT", 1)
        assert reply.finished.timing.e2e_ns >= 300_000_000
        assert 0 < len(reply.ids) < ENDLESS
        assert api.get(session_id).num_tokens == 2 + len(reply.ids)
        rest = api.turn(session_id, None, max_tokens=10, sampling=SAMPLING, stop=GO_ON).ids
    whole = api.said([5, 6], max_tokens=len(reply.ids) + 10, sampling=SAMPLING, stop=GO_ON)
    assert whole == reply.ids + rest


def test_a_queue_timeout_refuses_and_changes_nothing(rig: Rig) -> None:
    """`narrow` runs one turn at a time; the limit on how long the other may run is another matter."""
    api, worker = rig.api("narrow"), rig.workers["narrow"]
    with api.session() as running, api.session() as session_id:
        api.turn(session_id, [5, 6], max_tokens=4)
        before = api.get(session_id)
        stream = api.stream(running, [5, 6], max_tokens=ENDLESS, queue_timeout={"seconds": 30})
        generation_id = stream.read_tokens(1)
        refusal = refusal_of(lambda: api.turn(session_id, [7] * 30, queue_timeout=ns(100), time_limit=ns(50)))
        assert refusal == Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT", "")
        after = api.get(session_id)
        for field in ("num_tokens", "num_computed_tokens", "revision", "num_kv_blocks"):
            assert getattr(after, field) == getattr(before, field), field
        api.cancel(running, generation_id)
        assert stream.reply().end == "CANCELLED"
        assert len(api.turn(session_id, [7] * 30, max_tokens=3, queue_timeout={"seconds": 30}).ids) == 3
        assert len(worker.wait_for_tokens(session_id, 7)) == 7


@pytest.mark.parametrize("end", ["cancel", "deadline", "leave"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_cut_turn_is_rolled_back_or_kept_by_its_policy(api: Api, end: str, *, keeps: bool) -> None:
    with api.session(default_sampling=SAMPLING) as session_id:
        api.turn(session_id, [5, 6], max_tokens=8)
        before = api.get(session_id)
        asked: dict[str, Any] = {"max_tokens": ENDLESS, "stop": GO_ON, "cancel_policy": KEEP if keeps else 0}
        if end == "deadline":
            asked["timeout_s"] = 1.0
        stream = api.stream(session_id, [7, 8, 9], **asked)
        generation_id = stream.read_tokens(3)
        match end:
            case "cancel":
                api.cancel(session_id, generation_id)
                reply = stream.reply()
                assert (reply.end, reply.finished.revision) == ("CANCELLED", 1 + keeps)
            case "deadline":
                assert refusal_of(stream.reply).status is DEADLINE
            case _:
                stream.call.cancel()
        if keeps:
            wait_until(lambda: api.get(session_id).revision == 2, 10.0)
            num_kept = api.get(session_id).num_tokens - before.num_tokens - 3
            assert 3 <= num_kept < ENDLESS
            said = api.turn(session_id, None, max_tokens=10, stop=GO_ON).ids
        else:
            wait_until(lambda: api.get(session_id).num_tokens == before.num_tokens, 10.0)
            assert api.get(session_id).revision == 1
            num_kept, said = 0, api.turn(session_id, [7, 8, 9], max_tokens=10, stop=GO_ON).ids
    with api.session(default_sampling=SAMPLING) as twin:
        api.turn(twin, [5, 6], max_tokens=8)
        whole = api.turn(twin, [7, 8, 9], max_tokens=num_kept + 10, stop=GO_ON).ids
        assert whole[num_kept:] == said


def test_another_revision_than_expected_is_refused_and_changes_nothing(api: Api) -> None:
    with api.session() as session_id:
        assert api.turn(session_id, [5], max_tokens=2, expected_revision=0).finished.revision == 1
        assert api.append(session_id, [6], expected_revision=1).revision == 2
        assert api.update(session_id, labels={"a": "b"}, expected_revision=2).revision == 2
        before = api.get(session_id)
        for revision in (0, 1, 3, 2**64 - 1):
            calls: list[Callable[[], object]] = [
                lambda n=revision: api.turn(session_id, [5], max_tokens=2, expected_revision=n),
                lambda n=revision: api.append(session_id, [5], expected_revision=n),
                lambda n=revision: api.update(session_id, labels={"a": "c"}, expected_revision=n),
            ]
            for call in calls:
                assert refusal_of(call) == Refusal(
                    grpc.StatusCode.ABORTED, "REVISION_MISMATCH", "expected_revision"
                )
        assert api.get(session_id) == before


@pytest.mark.parametrize("model", ["plain", "narrow", "tight"])
@pytest.mark.parametrize("sizes", [(1, 49), (16, 16, 18), (49, 1), (15, 1, 1, 33)])
def test_input_ahead_of_a_turn_equals_one_input(rig: Rig, model: str, sizes: tuple[int, ...]) -> None:
    """Greedy and seeded, with the logprobs bit for bit."""
    api, ids = rig.api(model), [3 + (13 * place) % 250 for place in range(50)]
    for sampling in ({"logprobs": 2}, {"logprobs": 2, **SAMPLING}):
        with api.session() as whole, api.session() as ahead:
            expected = api.turn(whole, ids, max_tokens=20, sampling=sampling)
            at = 0
            for size in sizes[:-1]:
                view = api.append(ahead, ids[at : at + size])
                at += size
                assert (view.num_tokens, view.num_computed_tokens) == (at, at)
            said = api.turn(ahead, ids[at:], max_tokens=20, sampling=sampling)
            assert [token.SerializeToString() for token in said.tokens] == [
                token.SerializeToString() for token in expected.tokens
            ]
            assert said.finished.revision == len(sizes)
            assert said.finished.usage.cached_tokens + said.finished.usage.reprefilled_tokens in (at, at - 1)


def test_initial_input_equals_the_first_part_of_an_input(api: Api) -> None:
    ids = [3 + (13 * place) % 250 for place in range(40)]
    source = session_pb2.Input(token_ids=session_pb2.TokenIds(ids=ids[:33]))
    with api.session(initial_input=source) as session_id:
        view = api.get(session_id)
        assert (view.num_tokens, view.num_computed_tokens, view.revision) == (33, 33, 1)
        assert api.turn(session_id, ids[33:], max_tokens=20).ids == api.said(ids, max_tokens=20)


def test_messages_ahead_of_a_turn_equal_all_of_them_at_once(api: Api) -> None:
    """Before the first turn and before a later one, whose reply was cut."""
    told: tuple[tuple[str, str], ...] = (("system", "Be brief."), ("user", "one"), ("user", "two"))
    with api.session() as whole, api.session() as ahead:
        for _ in range(2):
            expected = api.turn(whole, chat(*told), max_tokens=12)
            for message in told[:-1]:
                api.append(ahead, chat(message))
            said = api.turn(ahead, chat(told[-1]), max_tokens=12)
            assert said.ids == expected.ids
            assert api.get(ahead).num_tokens == api.get(whole).num_tokens
        assert refusal_of(lambda: api.append(ahead, "raw", expected_revision=0)).reason == "REVISION_MISMATCH"
        api.append(ahead, "raw")
        assert refusal_of(lambda: api.append(ahead, chat(("user", "three")))).reason == "MIXED_INPUT"


def test_an_append_that_its_caller_left_has_appended_nothing(rig: Rig) -> None:
    """It waits behind another turn of `narrow` when its deadline comes."""
    api = rig.api("narrow")
    with api.session() as running, api.session() as session_id:
        stream = api.stream(running, [5, 6], max_tokens=ENDLESS)
        generation_id = stream.read_tokens(1)
        request = session_pb2.AppendInputRequest(
            session_id=session_id, input=session_pb2.Input(token_ids=session_pb2.TokenIds(ids=[7] * 30))
        )
        assert refusal_of(lambda: api.sessions.AppendInput(request, timeout=1.0)).status is DEADLINE
        wait_until(lambda: api.get(session_id).num_tokens == 0, 10.0)
        api.cancel(running, generation_id)
        assert stream.reply().end == "CANCELLED"
        assert api.append(session_id, [7] * 30).revision == 1
