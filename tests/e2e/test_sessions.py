"""Sessions and turns of a small model, through a real gateway and a real worker."""

import contextlib
import threading
from itertools import accumulate
from pathlib import Path

import pytest

import pagecast
from pagecast.v1 import generation_pb2, session_pb2
from worker.model.tokenizer import Tokenizer
from worker.model.weights.gguf import read_gguf

pytestmark = pytest.mark.e2e
# Long enough to be cut short wherever a test wants to.
LONG = 800


def _open(client: pagecast.Client, **options: object) -> pagecast.ClientSession:
    return client.open_session("tiny", **options)  # type: ignore[arg-type]


def _blocks(session: pagecast.ClientSession) -> int:
    return session.get().num_kv_blocks


def test_a_turn_streams_and_the_next_one_computes_only_what_is_new(client: pagecast.Client) -> None:
    with _open(client) as session:
        first = session.generate("Hello there", max_tokens=20).wait()
        assert len(first.token_ids) == first.usage.output_tokens
        assert first.usage.cached_tokens == 0
        second = session.generate("And again", max_tokens=5).wait()
        assert second.usage.cached_tokens == len(first.input_token_ids) + len(first.token_ids) - 1
        assert second.usage.reprefilled_tokens == 0
        view = session.get()
        assert view.revision == second.revision == 2
        assert view.num_tokens == sum(len(turn.input_token_ids + turn.token_ids) for turn in (first, second))


def test_s28_text_deltas_are_the_decoding_of_all_ids(client: pagecast.Client, tiny_path: Path) -> None:
    """Random ids make broken UTF-8 as often as not; deltas must still add up."""
    tokenizer = Tokenizer(read_gguf(tiny_path).tokenizer)
    with _open(client, temperature=1.5) as session:
        for seed in range(4):
            chunks = list(session.generate("x", max_tokens=60, seed=seed))
            ids = [token for chunk in chunks for token in chunk.token_ids]
            whole = b"".join(tokenizer.token_bytes(token) for token in ids)
            assert "".join(chunk.text for chunk in chunks) == whole.decode("utf-8", errors="replace")
            # Tokens that came faster than they were read share a chunk.
            before = list(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0))
            assert [chunk.first_token_index for chunk in chunks if chunk.token_ids] == [
                start for start, chunk in zip(before, chunks, strict=False) if chunk.token_ids
            ]


def test_both_plans_yield_the_same_tokens_and_count_differently(client: pagecast.Client) -> None:
    with _open(client, plan=pagecast.PLAN_ONCE) as once, _open(client, plan=pagecast.REPLAN) as replan:
        held = once.generate("Same words", max_tokens=30, temperature=1.0, seed=9).wait()
        fresh = replan.generate("Same words", max_tokens=30, temperature=1.0, seed=9).wait()
        assert held.token_ids == fresh.token_ids
        assert (held.plan_stats.reuses, held.plan_stats.replans) == (len(held.token_ids), 0)
        assert (fresh.plan_stats.reuses, fresh.plan_stats.replans) == (0, len(fresh.token_ids))
        assert held.plan_stats.launches_per_step == fresh.plan_stats.launches_per_step > 0
        assert replan.get().decode_plan == session_pb2.PAGED_DECODE_PLAN_REPLAN


def test_the_plan_can_change_in_the_middle_of_a_stream(client: pagecast.Client) -> None:
    sampling = {"temperature": 1.0, "seed": 2}
    actions: list[int] = []
    token_ids: list[int] = []
    with _open(client) as session, session.generate([5, 6, 7], token_timing=True, **sampling) as stream:
        for number, chunk in enumerate(stream):
            actions += [timing.plan_action for timing in chunk.timings]
            token_ids += chunk.token_ids
            if number == 5:
                session.update(plan=pagecast.REPLAN)
            if actions.count(generation_pb2.PLAN_ACTION_REPLANNED) > 20:
                break
    assert set(actions) == {generation_pb2.PLAN_ACTION_REUSED, generation_pb2.PLAN_ACTION_REPLANNED}
    with _open(client) as session:
        alone = session.generate([5, 6, 7], max_tokens=len(token_ids), **sampling).wait()
    assert tuple(token_ids) == alone.token_ids


def test_s20_eight_sessions_at_once_yield_what_each_yields_alone(client: pagecast.Client) -> None:
    prompts = [f"prompt number {number} " * (1 + 3 * number) for number in range(8)]

    def run(number: int) -> tuple[int, ...]:
        with _open(client, plan=pagecast.REPLAN if number % 4 == 3 else None) as session:
            seed = None if number % 2 else number
            turn = session.generate(
                prompts[number], max_tokens=24, temperature=0.0 if seed is None else 1.0, seed=seed
            )
            return turn.wait().token_ids

    alone = [run(number) for number in range(8)]
    together: dict[int, tuple[int, ...]] = {}
    threads = [threading.Thread(target=lambda n=number: together.update({n: run(n)})) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(8)] == alone


_CLIENT = """
import sys, pagecast
client = pagecast.Client(sys.argv[1])
for chunk in client.session(sys.argv[2]).generate([7] * 40, max_tokens=int(sys.argv[3])):
    print("token", flush=True)
"""


def test_a_cancel_by_another_call_ends_the_stream_ok(client: pagecast.Client) -> None:
    with _open(client) as session:
        stream = session.generate([7] * 40, max_tokens=LONG)
        next(stream)
        assert stream.generation_id is not None
        session.cancel(stream.generation_id)
        assert stream.wait().finish_reason is pagecast.FinishReason.CANCELLED
        assert session.get().num_tokens == 0
        with pytest.raises(pagecast.GenerationNotFound):
            session.cancel(stream.generation_id)


def test_labels_are_added_and_revisions_are_checked(client: pagecast.Client) -> None:
    with _open(client, labels={"a": "1", "b": "2"}) as session:
        session.update(labels={"b": "3", "c": "4"})
        assert dict(session.get().labels) == {"a": "1", "b": "3", "c": "4"}
        with pytest.raises(pagecast.RevisionMismatch):
            session.generate("x", max_tokens=1, expected_revision=1).wait()
        assert session.generate("x", max_tokens=1, expected_revision=0).wait().revision == 1
        with pytest.raises(pagecast.InvalidArgument) as refused:
            session.update(labels={f"label {number}": "" for number in range(62)})
        assert refused.value.field == "labels"


def test_a_turn_without_input_behind_appended_messages_is_their_reply(client: pagecast.Client) -> None:
    said = [pagecast.Message("system", "Be brief."), pagecast.Message("user", "hello")]
    with _open(client) as at_once, _open(client) as ahead:
        for _ in range(2):
            expected = at_once.generate(said, max_tokens=8, seed=1).wait()
            for message in said:
                ahead.append([message])
            reply = ahead.generate(None, max_tokens=8, seed=1).wait()
            assert reply.token_ids == expected.token_ids
            # Echoed and counted is what opens the reply.
            opening = reply.input_token_ids
            assert opening == expected.input_token_ids[-len(opening) :] != ()
            assert reply.usage.input_tokens == len(opening)
        assert ahead.get().num_tokens == at_once.get().num_tokens


def test_chat_and_raw_input_do_not_mix(client: pagecast.Client) -> None:
    with _open(client) as session:
        session.generate("raw", raw=True, max_tokens=3).wait()
        with pytest.raises(pagecast.PagecastError) as refused:
            session.generate("chat", max_tokens=3).wait()
        assert refused.value.reason == "MIXED_INPUT"
        assert session.generate(None, max_tokens=3).wait().revision == 2


def test_a_close_that_its_caller_left_is_done_all_the_same(client: pagecast.Client) -> None:
    for number in range(30):
        session = _open(client)
        stream = session.generate([5], max_tokens=LONG)
        next(stream)
        with contextlib.suppress(pagecast.DeadlineExceeded, pagecast.Cancelled):
            session.close(timeout_s=0.0005 * (1 + number % 4))
        assert session.close().state == session_pb2.SESSION_STATE_CLOSED
        assert session.get().num_kv_blocks == 0


def test_closing_twice_is_no_error_and_ends_the_session(client: pagecast.Client) -> None:
    session = _open(client)
    session.generate("a", max_tokens=3).wait()
    assert session.close().state == session_pb2.SESSION_STATE_CLOSED
    assert session.close().state == session_pb2.SESSION_STATE_CLOSED
    with pytest.raises(pagecast.PagecastError) as refused:
        session.generate("b").wait()
    assert refused.value.reason in {"SESSION_CLOSED", "SESSION_NOT_FOUND"}
