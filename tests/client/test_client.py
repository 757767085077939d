"""The blocking client against a real server over loopback."""

import threading
import time
import uuid

import grpc
import pytest

import pagecast
from pagecast.v1 import generation_pb2, model_pb2, session_pb2
from tests.client.fake_server import FakeServer, Refusal


def test_two_turns_stream_and_the_session_closes(fake: FakeServer) -> None:
    with pagecast.Client(fake.target) as client:
        with client.open_session("tiny", plan=pagecast.PLAN_ONCE, labels={"a": "b"}) as session:
            generation = session.generate("héy", max_tokens=2, temperature=0.5, seed=3, token_timing=True)
            chunks = list(generation)
            assert [chunk.text for chunk in chunks] == ["h", "é"]
            assert [chunk.first_token_index for chunk in chunks] == [0, 1]
            assert [chunk.timings[0].since_start_ns for chunk in chunks] == [1000, 2000]
            first = generation.result
            second = session.generate("more").wait()
            assert session.get().revision == 2
        assert fake.state[session.session_id].state == session_pb2.SESSION_STATE_CLOSED
    assert (first.text, first.token_ids) == ("hé", (ord("h"), ord("é")))
    assert first.input_token_ids == tuple(map(ord, "héy"))
    assert first.finish_reason is pagecast.FinishReason.MAX_TOKENS
    assert first.sampling.seed == 7
    assert (first.plan_stats.reuses, first.plan_stats.launches_per_step) == (2, 9)
    assert second.finish_reason is pagecast.FinishReason.EOS
    assert second.usage.cached_tokens == len("héy") + len("hé") - 1
    assert second.text == "more"
    opened = fake.last(session_pb2.OpenSessionRequest)
    assert opened == session_pb2.OpenSessionRequest(
        model="tiny", decode_plan=session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE, labels={"a": "b"}
    )
    request = next(r for r in fake.requests if isinstance(r, generation_pb2.GenerateRequest))
    assert request == generation_pb2.GenerateRequest(
        session_id=session.session_id,
        input={"messages": {"messages": [{"role": session_pb2.ROLE_USER, "content": "héy"}]}},
        sampling={"temperature": 0.5, "seed": 3},
        stopping={"max_tokens": 2},
        response={"token_timing": True, "input_token_ids": True},
    )


def test_times_are_the_readers(fake: FakeServer) -> None:
    fake.first_token_delay_s = 0.2
    with pagecast.Client(fake.target) as client:
        result = client.open_session("tiny").generate("abc").wait()
    assert result.ttft_ms is not None
    assert 200 <= result.ttft_ms < 2000
    assert len(result.itl_ms) == 2
    assert all(0 <= gap < 200 for gap in result.itl_ms)


def test_update_get_models_and_a_handle_by_id(fake: FakeServer) -> None:
    with pagecast.Client(fake.target) as client:
        session = client.session(client.open_session("tiny").session_id)
        updated = session.update(plan=pagecast.REPLAN, labels={"k": "v"}, expected_revision=0)
        assert pagecast.PagedDecodePlan(updated.decode_plan) is pagecast.REPLAN
        assert session.get().labels == {"k": "v"}
        assert fake.last(session_pb2.UpdateSessionRequest).HasField("expected_revision")
        assert [model.name for model in client.models()] == ["tiny"]
        assert session.close().state == session_pb2.SESSION_STATE_CLOSED


def test_result_before_the_end_is_refused(fake: FakeServer) -> None:
    fake.hold_after = 1
    with pagecast.Client(fake.target) as client, client.open_session("tiny").generate("ab") as generation:
        next(generation)
        with pytest.raises(RuntimeError, match="has not ended"):
            _ = generation.result


def test_cancel_ends_the_call_at_once(fake: FakeServer) -> None:
    fake.hold_after = 1
    with pagecast.Client(fake.target) as client:
        generation = client.open_session("tiny").generate("abc")
        assert next(generation).text == "a"
        generation.cancel()
        with pytest.raises(pagecast.Cancelled, match=r"^CANCELLED: the call was cancelled$"):
            next(generation)
        assert fake.ended.wait(5)


def test_what_came_stays_readable_when_the_turn_ends_in_an_exception(fake: FakeServer) -> None:
    with pagecast.Client(fake.target) as client:
        session = client.open_session("tiny")
        fake.hold_after = 2
        generation = session.generate("abc")
        assert (generation.text, generation.token_ids) == ("", ())
        next(generation)
        assert (generation.text, generation.token_ids) == ("a", (97,))
        generation.cancel()
        with pytest.raises(RuntimeError, match=r"^the generation was cancelled before it had been read"):
            _ = generation.result
        with pytest.raises(pagecast.Cancelled):
            generation.wait()
        with pytest.raises(
            RuntimeError, match=r"no result: it ended with CANCELLED: the call was cancelled$"
        ):
            _ = generation.result
        generation = session.generate("abc", timeout_s=0.3)
        with pytest.raises(pagecast.DeadlineExceeded):
            generation.wait()
        assert (generation.text, generation.token_ids) == ("ab", (97, 98))
        with pytest.raises(
            RuntimeError, match=r"it ended with DEADLINE_EXCEEDED: the deadline of 0.3 s passed$"
        ):
            _ = generation.result
        fake.hold_after = None
        generation = session.generate("abc")
        generation.wait()
        generation.cancel()  # too late to change anything
        assert (generation.result.text, generation.text) == ("abc", "abc")


def test_close_and_cancel_carry_a_request_id(fake: FakeServer) -> None:
    request_id = uuid.uuid4()
    with pagecast.Client(fake.target) as client:
        session = client.open_session("tiny")
        with pytest.raises(pagecast.GenerationNotFound):
            session.cancel("gen_9", request_id=request_id)
        assert fake.last(generation_pb2.CancelGenerationRequest).request_id == str(request_id)
        session.close(request_id=request_id)
        assert fake.last(session_pb2.CloseSessionRequest).request_id == str(request_id)


def test_leaving_a_generation_cancels_it(fake: FakeServer) -> None:
    fake.hold_after = 1
    with pagecast.Client(fake.target) as client:
        with client.open_session("tiny").generate("abc") as generation:
            next(generation)
        assert fake.ended.wait(5)


def test_dropping_a_generation_cancels_it(fake: FakeServer) -> None:
    fake.hold_after = 1
    with pagecast.Client(fake.target) as client:
        session = client.open_session("tiny")
        for _ in session.generate("abc"):
            break
        assert fake.ended.wait(5)


def test_cancel_from_outside_ends_the_stream_ok(fake: FakeServer) -> None:
    fake.hold_after = 2
    with pagecast.Client(fake.target) as client:
        session = client.open_session("tiny")
        generation = session.generate("abcd", keep_partial=True)
        next(generation)
        assert generation.generation_id == "gen_0"
        canceller = threading.Timer(0.1, session.cancel, (generation.generation_id,))
        canceller.start()
        assert [chunk.text for chunk in generation] == ["b"]
        canceller.join()
        assert generation.result.finish_reason is pagecast.FinishReason.CANCELLED
        with pytest.raises(pagecast.GenerationNotFound):
            session.cancel("gen_9")
    assert (
        fake.last(generation_pb2.GenerateRequest).cancel_policy == generation_pb2.CANCEL_POLICY_KEEP_PARTIAL
    )


def test_deadline_of_a_generation(fake: FakeServer) -> None:
    fake.hold_after = 1
    with pagecast.Client(fake.target) as client:
        session = client.open_session("tiny")
        sent = time.monotonic()
        with pytest.raises(pagecast.DeadlineExceeded) as caught:
            session.generate("abc", timeout_s=0.3).wait()
        assert 0.2 < time.monotonic() - sent < 3
        assert str(caught.value) == "DEADLINE_EXCEEDED: the deadline of 0.3 s passed"
        assert fake.ended.wait(5)


def test_a_failing_body_is_not_hidden_by_a_failing_close(fake: FakeServer) -> None:
    fake.refusals["CloseSession"] = Refusal(grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
    with pagecast.Client(fake.target) as client:
        with pytest.raises(KeyError, match="body"), client.open_session("tiny"):
            raise KeyError("body")
        with pytest.raises(pagecast.WorkerLost), client.open_session("tiny"):
            pass


def test_no_server_is_unavailable() -> None:
    with pagecast.Client("127.0.0.1:1", timeout_s=5) as client, pytest.raises(pagecast.Unavailable) as caught:
        client.models()
    assert caught.value.reason == "UNAVAILABLE"


def test_options_of_a_session_are_its_defaults(fake: FakeServer) -> None:
    request_id = uuid.uuid4()
    with pagecast.Client(fake.target) as client:
        client.open_session(
            "tiny", top_k=3, logit_bias={5: 1.5}, priority=-1, initial_input="hi", request_id=request_id
        )
    assert fake.last(session_pb2.OpenSessionRequest) == session_pb2.OpenSessionRequest(
        request_id=str(request_id),
        model="tiny",
        default_sampling={"top_k": 3, "logit_bias": {5: 1.5}},
        initial_input={"messages": {"messages": [{"role": session_pb2.ROLE_USER, "content": "hi"}]}},
        priority=-1,
    )


def test_append_then_a_turn_without_input_of_its_own(fake: FakeServer) -> None:
    with pagecast.Client(fake.target) as client:
        session = client.open_session("tiny")
        appended = session.append([1, 2, 3], expected_revision=0, request_id="r")
        assert (appended.revision, appended.num_tokens) == (1, 3)
        assert session.generate(None).wait().usage.cached_tokens == 2
    request = fake.last(session_pb2.AppendInputRequest)
    assert (request.request_id, request.input.token_ids.ids) == ("r", [1, 2, 3])
    assert request.HasField("expected_revision")


def test_sessions_are_read_page_by_page_as_they_are_needed(fake: FakeServer) -> None:
    with pagecast.Client(fake.target) as client:
        opened = [client.open_session("tiny").session_id for _ in range(5)]
        sessions = client.sessions(page_size=2)
        assert not any(isinstance(request, session_pb2.ListSessionsRequest) for request in fake.requests)
        found = [next(sessions).session_id for _ in range(2)]
        pages = [r for r in fake.requests if isinstance(r, session_pb2.ListSessionsRequest)]
        assert len(pages) == 1
        found += [session.session_id for session in sessions]
        assert found == opened[::-1]
        assert [s.session_id for s in client.sessions()] == opened[::-1]
        assert not fake.last(session_pb2.ListSessionsRequest).HasField("page_size")
        with pytest.raises(TypeError, match=r"^page_size: "):
            client.sessions(page_size="2")  # type: ignore[arg-type]


def test_tokens_there_and_back(fake: FakeServer) -> None:
    with pagecast.Client(fake.target) as client:
        assert client.tokenize("tiny", "hé", raw=True) == (ord("h"), ord("é"))
        assert fake.last(model_pb2.TokenizeRequest).input.text == "hé"
        assert client.detokenize("tiny", [ord("h"), ord("é")]) == "hé"
        with pytest.raises(pagecast.ModelNotFound):
            client.tokenize("other", "a")


def test_a_stop_logprobs_and_priority(fake: FakeServer) -> None:
    with pagecast.Client(fake.target) as client:
        session = client.open_session("tiny")
        chunks = list(generation := session.generate("hello", stop="lo", logprobs=2))
        assert session.update(priority=4).priority == 4
        silent = session.generate("a", stop_token_ids=[5], time_limit_s=1.5).wait()
    result = generation.result
    assert (result.finish_reason, result.stopped_by) == (pagecast.FinishReason.STOP_SEQUENCE, "lo")
    assert result.logprobs == (0.0, -1.0, -2.0) == sum((chunk.logprobs for chunk in chunks), ())
    assert result.top_logprobs[2] == ((0, 0.0), (1, -1.0))
    assert chunks[2].top_logprobs == (((0, 0.0), (1, -1.0)),)
    assert (silent.stopped_by, silent.logprobs, silent.top_logprobs) == (None, (), ())
    request = fake.last(generation_pb2.GenerateRequest)
    assert request.time_limit.ToMilliseconds() == 1500
    assert not request.HasField("queue_timeout")
