"""Cases about the life of sessions and turns, over gRPC: who leaves, who comes twice, who overlaps."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pagecast.v1 import generation_pb2, session_pb2
from tests.e2e.calls import ENDLESS, GO_ON, Api, Refusal, Stream, refusal_of
from tests.e2e.processes import wait_until
from tests.e2e.rig import Rig

pytestmark = pytest.mark.e2e
FIRST, NEXT = [3 + place for place in range(21)], [7, 8, 9]
KEEP = generation_pb2.CANCEL_POLICY_KEEP_PARTIAL
_CLIENT = """
import sys, grpc
from pagecast.v1 import generation_pb2, generation_pb2_grpc, session_pb2
target, session_id, count = sys.argv[1:]
request = generation_pb2.GenerateRequest(
    session_id=session_id,
    input=session_pb2.Input(text="left alone"),
    stopping=generation_pb2.StoppingCriteria(max_tokens=int(count)),
)
for event in generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(target)).Generate(request):
    print(event.WhichOneof("event"), flush=True)
"""


def begun(api: Api, session_id: str) -> Stream:
    """A turn whose first token is there."""
    stream = api.stream(session_id, NEXT, max_tokens=12)
    stream.read_tokens(1)
    return stream


def until_free(call: Callable[[], Stream]) -> Stream:
    """Try a turn again for as long as the session is busy."""
    deadline_s = time.monotonic() + 10.0
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.ABORTED or time.monotonic() > deadline_s:
                raise


def wait_for_length(api: Api, session_id: str, num_tokens: int) -> None:
    wait_until(lambda: api.get(session_id).num_tokens == num_tokens, 10.0)


def assert_nothing_else_runs(api: Api) -> None:
    """Every step of this turn has one row: its own."""
    with api.session() as session_id:
        reply = api.turn(session_id, [5], max_tokens=5, response={"token_timing": True})
    assert [token.timing.batch_size for token in reply.tokens] == [1] * 5


def undisturbed(api: Api) -> list[list[int]]:
    """What two turns say that nobody disturbs."""
    with api.session() as session_id:
        return [api.turn(session_id, given, max_tokens=12).ids for given in (FIRST, NEXT)]


def test_s01_a_session_answers_within_a_second_after_its_client_was_killed(rig: Rig, api: Api) -> None:
    first, following = undisturbed(api)
    with api.session() as session_id:
        assert api.turn(session_id, FIRST, max_tokens=12).ids == first
        command = [sys.executable, "-c", _CLIENT, rig.server.target, session_id, str(ENDLESS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert [child.stdout.readline() for _ in range(3)][-1] == b"chunk\n"
            assert refusal_of(lambda: api.turn(session_id, NEXT)).reason == "SESSION_BUSY"
            child.kill()
            killed_s = time.monotonic()
            stream = until_free(lambda: begun(api, session_id))
            assert time.monotonic() - killed_s < 1.0
        reply = stream.reply()
        assert reply.ids == following
        assert reply.finished.revision == 2


def test_s02_a_running_turn_stops_at_its_deadline(rig: Rig, api: Api) -> None:
    num_free = rig.workers["plain"].num_free
    with api.session() as session_id:
        stream = api.stream(session_id, FIRST, max_tokens=ENDLESS, timeout_s=0.8)
        assert refusal_of(stream.reply).status is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for_length(api, session_id, 0)
        assert_nothing_else_runs(api)
        assert api.get(session_id).num_kv_blocks == 0
        assert rig.workers["plain"].num_free == num_free
        assert 0 < len(rig.workers["plain"].wait_for_tokens(session_id, 1)) < ENDLESS
        assert api.turn(session_id, FIRST, max_tokens=12).ids == undisturbed(api)[0]


def test_s02_a_queued_turn_never_runs_after_its_deadline(rig: Rig) -> None:
    """`narrow` runs one turn at a time: the other one waits until its caller has gone."""
    api, worker = rig.api("narrow"), rig.workers["narrow"]
    with api.session() as running, api.session() as session_id:
        stream = api.stream(running, FIRST, max_tokens=ENDLESS)
        stream.read_tokens(1)
        late = api.stream(session_id, FIRST, max_tokens=4, timeout_s=1.0)
        wait_for_length(api, session_id, len(FIRST))
        assert refusal_of(late.reply).status is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for_length(api, session_id, 0)
        assert api.get(running).num_tokens < len(FIRST) + ENDLESS  # it had not ended by then
        num_drawn = len(api.turn(running_out(api, stream, running), NEXT, max_tokens=3).ids)
        assert num_drawn == 3
        assert worker.tokens(session_id) == []
        assert api.get(session_id).num_computed_tokens == 0
        assert api.turn(session_id, FIRST, max_tokens=4).ids == undisturbed(api)[0][:4]
        worker.wait_for_tokens(session_id, 4)


def running_out(api: Api, stream: Any, session_id: str) -> str:
    """Cancel a turn and read it to its end; its session."""
    api.cancel(session_id, stream.read_tokens(1))
    assert stream.reply().end == "CANCELLED"
    return session_id


def test_s03_an_aborted_turn_changes_nothing_of_a_long_session(rig: Rig, api: Api) -> None:
    worker = rig.workers["plain"]
    long = [3 + (11 * place) % 250 for place in range(300)]
    with api.session() as session_id, api.session() as twin:
        for name in (session_id, twin):
            api.turn(name, long, max_tokens=10)
        before, num_free = api.get(session_id), worker.num_free
        for num_read in (0, 1, 20):
            stream = api.stream(session_id, NEXT * 20, max_tokens=ENDLESS)
            if num_read:
                stream.read_tokens(num_read)
                running_out(api, stream, session_id)
            else:
                wait_until(lambda: api.get(session_id).num_tokens > before.num_tokens, 10.0)
                stream.call.cancel()
                wait_for_length(api, session_id, before.num_tokens)
            after = api.get(session_id)
            for field in ("num_tokens", "num_computed_tokens", "revision", "num_kv_blocks", "kv_residency"):
                assert getattr(after, field) == getattr(before, field), field
            assert worker.num_free == num_free
        replies = [api.turn(name, NEXT, max_tokens=10) for name in (session_id, twin)]
        assert replies[0].ids == replies[1].ids
        assert replies[0].finished.usage == replies[1].finished.usage
        assert replies[0].finished.usage.cached_tokens == 309


def test_s04_idle_sessions_give_up_their_kv_and_an_overlapping_turn_has_no_effect(rig: Rig) -> None:
    """`tight` has 32 blocks: three idle sessions fill it, and the fourth turn takes what it needs."""
    api, worker = rig.api("tight"), rig.workers["tight"]
    prompts = [[3 + (number + 5 * place) % 250 for place in range(160)] for number in range(4)]
    expected = [rig.api("plain").said(ids, max_tokens=9) for ids in prompts]
    sessions = [api.open() for _ in prompts]
    assert [
        api.turn(name, ids, max_tokens=9).ids for name, ids in zip(sessions, prompts, strict=True)
    ] == expected
    views = [api.get(name) for name in sessions]
    assert views[0].kv_residency == session_pb2.KV_RESIDENCY_DROPPED
    assert sum(view.num_kv_blocks for view in views) <= 32
    # In REPLAN a turn takes seconds, so that another one surely overlaps.
    api.update(sessions[0], decode_plan=session_pb2.PAGED_DECODE_PLAN_REPLAN)
    stream = api.stream(sessions[0], NEXT, max_tokens=300)
    stream.read_tokens(1)
    assert refusal_of(lambda: api.turn(sessions[0], NEXT)) == Refusal(
        grpc.StatusCode.ABORTED, "SESSION_BUSY", ""
    )
    api.update(sessions[0], decode_plan=session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE)
    reply = stream.reply()
    assert reply.finished.usage.reprefilled_tokens == 168
    assert reply.started.kv_residency == session_pb2.KV_RESIDENCY_DROPPED
    with rig.api("plain").session() as session_id:
        rig.api("plain").turn(session_id, prompts[0], max_tokens=9)
        assert rig.api("plain").turn(session_id, NEXT, max_tokens=300).ids == reply.ids
    for name in sessions:
        api.close(name)
    assert worker.num_free == 32


@pytest.mark.parametrize("leave", ["cancel", "disconnect", "close"])
def test_s05_a_session_works_after_its_queued_turn_was_aborted(rig: Rig, api: Api, leave: str) -> None:
    """By its own call's cancel, by a connection that ends, or by closing the session."""
    narrow, worker = rig.api("narrow"), rig.workers["narrow"]
    num_free = worker.num_free
    with narrow.session() as running, narrow.session() as session_id:
        first = narrow.turn(session_id, FIRST, max_tokens=12).ids
        length = narrow.get(session_id).num_tokens
        stream = narrow.stream(running, FIRST, max_tokens=ENDLESS)
        stream.read_tokens(1)
        with grpc.insecure_channel(rig.server.target) as channel:
            queued = Api(channel, "narrow").stream(session_id, NEXT * 5, max_tokens=ENDLESS)
            wait_for_length(narrow, session_id, length + 15)
            match leave:
                case "cancel":
                    queued.call.cancel()
                case "disconnect":
                    channel.close()
                case _:
                    narrow.close(session_id)
                    assert (queued.reply().end, queued.reply().ids) == ("CANCELLED", [])
        if leave == "close":
            assert refusal_of(lambda: narrow.turn(session_id, NEXT)).reason == "SESSION_CLOSED"
        else:
            wait_for_length(narrow, session_id, length)
        running_out(narrow, stream, running)
        assert len(worker.wait_for_tokens(session_id, 12)) == 12
        if leave != "close":
            said = narrow.turn(session_id, NEXT, max_tokens=12).ids
            assert [first, said] == undisturbed(api)
    assert narrow.said(FIRST, max_tokens=12) == first
    assert worker.num_free == num_free


@pytest.mark.parametrize("num_read", [0, 1, 2, 40])
@pytest.mark.parametrize("policy", ["ROLLBACK", "KEEP_PARTIAL"])
def test_s32_a_turn_after_a_disconnect_equals_an_undisturbed_one(
    rig: Rig, api: Api, num_read: int, policy: str
) -> None:
    """The turn is gone, or kept as far as it came; the connection ends after so many events."""
    sampling = {"temperature": 1.0, "seed": 11}
    with api.session(default_sampling=sampling) as session_id, api.session(default_sampling=sampling) as twin:
        for name in (session_id, twin):
            api.turn(name, FIRST, max_tokens=12)
        before = api.get(session_id)
        with grpc.insecure_channel(rig.server.target) as channel:
            stream = Api(channel, "plain").stream(
                session_id,
                NEXT,
                max_tokens=ENDLESS,
                stop=GO_ON,
                cancel_policy=generation_pb2.CancelPolicy.Value(f"CANCEL_POLICY_{policy}"),
            )
            for _ in range(num_read):
                stream.read()
            wait_until(lambda: api.get(session_id).num_tokens > before.num_tokens, 10.0)
        if policy == "ROLLBACK":
            wait_for_length(api, session_id, before.num_tokens)
            assert api.get(session_id).revision == before.revision
            pair = [api.turn(name, NEXT, max_tokens=30, stop=GO_ON).ids for name in (session_id, twin)]
        else:
            wait_until(lambda: api.get(session_id).revision > before.revision, 10.0)
            num_kept = api.get(session_id).num_tokens - before.num_tokens - len(NEXT)
            assert num_kept >= num_read - 1
            rest = api.turn(session_id, None, max_tokens=30, stop=GO_ON).ids
            said = api.turn(twin, NEXT, max_tokens=num_kept + 30, stop=GO_ON).ids
            pair = [rest, said[num_kept:]]
        assert pair[0] == pair[1]
        assert len(pair[0]) == 30
