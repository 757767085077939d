"""Plan modes over gRPC: mixed in one worker, flipped in the middle of turns; no token may tell."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from pagecast.v1 import generation_pb2, session_pb2
from tests.e2e.calls import GO_ON, Api, Refusal, Reply, refusal_of
from tests.e2e.rig import Rig

pytestmark = pytest.mark.e2e
ONCE, REPLAN = session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE, session_pb2.PAGED_DECODE_PLAN_REPLAN
SESSIONS, TURNS = 32, 3
BLOCK, STEP_TOKENS = 16, 64
LENGTHS = [
    border + offset for border in (BLOCK, 2 * BLOCK, STEP_TOKENS, 2 * STEP_TOKENS) for offset in (-1, 0, 1)
]
TOTALS = ("builds", "reuses", "replans", "plan_ns", "step_ns")


@dataclass(frozen=True, slots=True)
class Script:
    """What one session is asked: an input and options for each turn."""

    turns: tuple[tuple[list[int], dict[str, Any]], ...]

    @classmethod
    def of(cls, number: int) -> "Script":
        """Inputs of up to three blocks, half of the sessions greedy, all from one seed."""
        chance = random.Random(number)
        turns = []
        for turn in range(TURNS):
            sampling = {"temperature": 1.2, "seed": 100 * number + turn, "top_p": 0.95} if number % 2 else {}
            given = [chance.randrange(3, 250) for _ in range(chance.randrange(1, 3 * BLOCK))]
            options = {"max_tokens": chance.randrange(20, 40), "sampling": sampling, "stop": GO_ON}
            turns.append((given, options))
        return cls(tuple(turns))

    def play(self, api: Api, session_id: str) -> list[Reply]:
        timed = generation_pb2.ResponseOptions(token_timing=True)
        return [api.turn(session_id, given, response=timed, **options) for given, options in self.turns]


def num_steps(stats: session_pb2.PlanStats) -> int:
    return stats.builds + stats.reuses + stats.replans


def actions_of(reply: Reply) -> list[generation_pb2.PlanAction]:
    return [token.timing.plan_action for token in reply.tokens]


def assert_adds_up(api: Api, session_id: str, replies: Sequence[Reply]) -> None:
    """Counters of turns against their tokens, and of the session against its turns."""
    for reply in replies:
        stats, actions = reply.finished.plan_stats, actions_of(reply)
        # A step is a token's, or takes in a part of the input.
        assert 0 <= num_steps(stats) - len(actions) <= reply.finished.usage.input_tokens
        assert stats.replans >= actions.count(generation_pb2.PLAN_ACTION_REPLANNED)
        assert stats.reuses >= actions.count(generation_pb2.PLAN_ACTION_REUSED)
        assert stats.step_ns >= sum(token.timing.step_ns for token in reply.tokens) > 0
        assert stats.plan_ns >= sum(token.timing.plan_ns for token in reply.tokens) > 0
        last = reply.tokens[-1].timing
        assert (stats.launches_per_step, stats.host_bytes_per_step) == (last.launches, last.host_bytes)
        assert stats.arena_bytes > 0
    whole = api.get(session_id).plan_stats
    for name in TOTALS:
        assert getattr(whole, name) == sum(getattr(reply.finished.plan_stats, name) for reply in replies)


def test_s19_sessions_of_mixed_and_flipped_modes_say_what_each_says_alone(rig: Rig) -> None:
    """32 sessions at once for three turns each, while their modes are set again and again at random."""
    api = rig.api("plain")
    scripts = [Script.of(number) for number in range(SESSIONS)]
    alone = []
    for script in scripts:
        with api.session(decode_plan=ONCE) as session_id:
            replies = script.play(api, session_id)
            # Each input fits one step, and then every step is a token's.
            assert [num_steps(reply.finished.plan_stats) for reply in replies] == [
                len(reply.ids) for reply in replies
            ]
            assert all(reply.finished.plan_stats.replans == 0 for reply in replies)
            alone.append([reply.ids for reply in replies])
    chance = random.Random(7)
    sessions = [api.open(decode_plan=chance.choice((ONCE, REPLAN))) for _ in range(SESSIONS)]
    over = threading.Event()

    def flip() -> int:
        count = 0
        while not over.is_set():
            plan = chance.choice((ONCE, REPLAN))
            assert api.update(chance.choice(sessions), decode_plan=plan).decode_plan == plan
            count += 1
        return count

    with ThreadPoolExecutor(SESSIONS + 1) as threads:
        flips = threads.submit(flip)
        try:
            played = list(
                threads.map(lambda number: scripts[number].play(api, sessions[number]), range(SESSIONS))
            )
        finally:
            over.set()
        assert flips.result() > SESSIONS
    assert [[reply.ids for reply in replies] for replies in played] == alone
    for session_id, replies in zip(sessions, played, strict=True):
        assert_adds_up(api, session_id, replies)
        api.close(session_id)
    stats = [reply.finished.plan_stats for replies in played for reply in replies]
    assert (
        sum(each.replans > 0 and each.reuses > 0 for each in stats) > SESSIONS // 4
    )  # modes did flip amid turns
    assert rig.server.events("internal_error") == []


@pytest.mark.parametrize("length", LENGTHS)
def test_s19_lengths_around_borders_say_the_same_in_both_modes(api: Api, length: int) -> None:
    """Of a block and of a step, in a first turn and in one behind another; flipped between them too."""
    ids = [3 + (11 * place + length) % 250 for place in range(length)]
    wanted = {ONCE: generation_pb2.PLAN_ACTION_REUSED, REPLAN: generation_pb2.PLAN_ACTION_REPLANNED}
    timed = generation_pb2.ResponseOptions(token_timing=True)

    def said(*plans: session_pb2.PagedDecodePlan) -> list[list[int]]:
        found = []
        with api.session(decode_plan=plans[0]) as session_id:
            for number, plan in enumerate(plans):
                api.update(session_id, decode_plan=plan)
                given = ids[number:] or [5]
                reply = api.turn(session_id, given, max_tokens=2 * BLOCK + 2, response=timed)
                assert set(actions_of(reply)) <= {wanted[plan], generation_pb2.PLAN_ACTION_BUILT}
                assert wanted[plan] in actions_of(reply)
                found.append(reply.ids)
        return found

    expected = said(ONCE, ONCE)
    assert said(REPLAN, REPLAN) == expected
    assert said(ONCE, REPLAN) == expected
    assert said(REPLAN, ONCE) == expected


def test_a_worker_takes_so_many_sessions_in_replan_and_no_more(rig: Rig) -> None:
    """`narrow` takes one."""
    api = rig.api("narrow")
    full = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", "decode_plan")
    with api.session(decode_plan=REPLAN) as first, api.session() as second:
        assert refusal_of(lambda: api.open(decode_plan=REPLAN)) == full
        before = api.get(second)
        assert (
            refusal_of(lambda: api.update(second, decode_plan=REPLAN, labels={"a": "b"}, priority=3)) == full
        )
        assert api.get(second) == before
        assert api.update(first, decode_plan=REPLAN).decode_plan == REPLAN
        assert api.update(first, decode_plan=ONCE).decode_plan == ONCE
        assert api.update(second, decode_plan=REPLAN).decode_plan == REPLAN
        assert refusal_of(lambda: api.update(first, decode_plan=REPLAN)) == full
        assert api.turn(second, [5, 6], max_tokens=4).ids == api.turn(first, [5, 6], max_tokens=4).ids
    with api.session(decode_plan=REPLAN):
        pass
