"""More sessions than the pool has room for, and who comes first, over gRPC."""

from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise

import pytest

from pagecast.v1 import session_pb2
from tests.e2e.calls import ENDLESS, GO_ON, Api
from tests.e2e.processes import wait_until
from tests.e2e.rig import Rig, Worker

pytestmark = pytest.mark.e2e
SESSIONS, TURNS = 32, 3
INPUT, OUTPUT = 12, 10
ONCE, REPLAN = session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE, session_pb2.PAGED_DECODE_PLAN_REPLAN


def talk(api: Api) -> tuple[dict[int, list[list[int]]], list[str]]:
    """Three turns on each of 32 sessions, all at once, in both plan modes; tokens, and the sessions' ids."""
    sessions = [api.open(decode_plan=(ONCE, REPLAN)[number % 4 == 3]) for number in range(SESSIONS)]

    def converse(number: int) -> list[list[int]]:
        said = []
        for turn in range(TURNS):
            given = [3 + (7 * number + 31 * turn + place) % 250 for place in range(INPUT)]
            sampling = {"temperature": 1.0, "seed": number} if number % 2 else {}
            reply = api.turn(sessions[number], given, max_tokens=OUTPUT, sampling=sampling, stop=GO_ON)
            assert (reply.end, reply.finished.revision) == ("MAX_TOKENS", turn + 1)
            said.append(reply.ids)
        return said

    with ThreadPoolExecutor(SESSIONS) as threads:
        return dict(enumerate(threads.map(converse, range(SESSIONS)))), sessions


def steps_with_tokens(worker: Worker, sessions: list[str]) -> int:
    """At least so many steps drew a token.

    Tokens of one run share the time that drawing them took, and a step is a run of PLAN_ONCE, one of REPLAN,
    or the one and then the other; where these belong to two steps they are counted as one.
    """
    count = SESSIONS * TURNS * OUTPUT
    wait_until(lambda: len(worker.tokens(*sessions)) == count, 10.0)
    tokens = worker.tokens(*sessions)
    plans = [plan for (plan, _), _ in groupby((token["decode_plan"], token["sample_ns"]) for token in tokens)]
    return len(plans) - list(pairwise(plans)).count(("PLAN_ONCE", "REPLAN"))


def test_s14_a_pool_of_a_quarter_says_what_a_big_one_says(rig: Rig) -> None:
    """All finish, every step draws a token for someone, and no token depends on the pool."""
    big, tight = rig.api("plain"), rig.api("tight")
    needed = SESSIONS * -(-TURNS * (INPUT + OUTPUT) // 16)
    worker = rig.workers["tight"]
    assert worker.num_free * 4 <= needed
    expected, opened = talk(big)
    for name in opened:
        big.close(name)
    before = worker.info()
    said, opened = talk(tight)
    assert said == expected
    num_steps = worker.info().num_steps - before.num_steps
    assert num_steps - steps_with_tokens(worker, opened) <= num_steps // 50
    dropped = [name for name in opened if tight.get(name).kv_residency == session_pb2.KV_RESIDENCY_DROPPED]
    assert len(dropped) > SESSIONS // 4  # the pool was too small
    for name in opened:
        tight.close(name)
    assert worker.num_free == before.num_free_kv_blocks == 32


def test_a_late_turn_of_a_high_priority_overtakes_those_that_wait_and_the_one_that_runs(rig: Rig) -> None:
    """`narrow` runs one turn at a time. Equals come as they arrived."""
    api, worker = rig.api("narrow"), rig.workers["narrow"]
    expected = api.said([5, 6], max_tokens=6)
    names = ["running", "low", "early", "late", "high", "urgent"]
    sessions = {name: api.open(priority={"low": -1, "high": 1}.get(name, 0)) for name in names}
    running = api.stream(sessions["running"], [5, 6], max_tokens=ENDLESS)
    generation_id = running.read_tokens(1)
    streams = {}
    for name in names[1:]:
        priority = 2 if name == "urgent" else None
        streams[name] = api.stream(sessions[name], [5, 6], max_tokens=6, priority=priority)
        # Known to the engine before the next one is sent.
        wait_until(lambda name=name: api.get(sessions[name]).num_tokens >= 2, 10.0)
    for name in ("urgent", "high"):
        assert streams[name].reply().ids == expected
    assert api.get(sessions["early"]).num_computed_tokens == 0
    api.cancel(sessions["running"], generation_id)
    assert running.reply().end == "CANCELLED"
    for name in ("early", "late", "low"):
        assert streams[name].reply().ids == expected
    for name in names[1:]:
        worker.wait_for_tokens(sessions[name], 6)
    drawn = worker.tokens(*(sessions[name] for name in names[1:]))
    starts = [token["session_id"] for token in drawn if token["index"] == 0]
    assert sorted(starts[:2]) == sorted([sessions["high"], sessions["urgent"]])
    assert starts[2:] == [sessions[name] for name in ("early", "late", "low")]
    for session_id in sessions.values():
        api.close(session_id)


def test_a_new_priority_moves_a_turn_that_waits(rig: Rig) -> None:
    api, worker = rig.api("narrow"), rig.workers["narrow"]
    sessions = [api.open() for _ in range(3)]
    running = api.stream(sessions[0], [5, 6], max_tokens=ENDLESS, priority=9)
    generation_id = running.read_tokens(1)
    streams = []
    for name in sessions[1:]:
        streams.append(api.stream(name, [7], max_tokens=3))
        wait_until(lambda name=name: api.get(name).num_tokens >= 1, 10.0)
    assert api.update(sessions[2], priority=5).priority == 5
    api.cancel(sessions[0], generation_id)
    for stream in streams:
        stream.reply()
    for name in sessions[1:]:
        worker.wait_for_tokens(name, 3)
    starts = [token["session_id"] for token in worker.tokens(*sessions[1:]) if token["index"] == 0]
    assert starts == [sessions[2], sessions[1]]
    for name in sessions:
        api.close(name)
