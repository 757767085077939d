"""When a turn is due, told ahead: the table looks at no turn before."""

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from worker.commands import Submit
from worker.detokenize import Detokenizer
from worker.model.chat import Conversation
from worker.params import Sampling, Stopping
from worker.session import Generation
from worker.stops import StopMatcher
from worker.turn import NEVER_NS, Turn

TIMES = st.none() | st.integers(0, 60)


@given(st.integers(0, 50), st.none() | st.integers(-5, 100), TIMES, TIMES, st.none() | st.integers(0, 40))
def test_nothing_is_overdue_before_it_is_due(
    received_ns: int, deadline_ns: int | None, queue: int | None, limit: int | None, queue_ns: int | None
) -> None:
    asked = Submit(
        session_id="s",
        generation_id="g",
        built_on_revision=0,
        expected_revision=None,
        input_ids=(1,),
        conversation=Conversation(),
        sampling=Sampling(),
        stopping=Stopping(),
        keeps_partial=False,
        received_ns=received_ns,
        deadline_ns=deadline_ns,
        queue_timeout_ns=queue,
        time_limit_ns=limit,
    )
    turn = Turn(cast("Any", None), Generation("g", (1,)), asked, Detokenizer(lambda _: b""), StopMatcher(()))
    if queue_ns is not None:
        turn.is_announced, turn.queue_ns = True, queue_ns
    late = [now_ns for now_ns in range(-10, 200) if turn.overdue(now_ns) is not None]
    assert turn.due_ns == NEVER_NS if not late else max(turn.due_ns, -10) == late[0]
