"""What is sent for each kind of input, and what a stream that does not fit together raises."""

from typing import Any

import pytest

import pagecast
from pagecast import _requests
from pagecast._turn import Turn
from pagecast.v1 import generation_pb2, session_pb2
from tests.client.fake_server import FakeServer


def started() -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(started={"generation_id": "gen_0"})


def chunk(first: int, *ids: int) -> generation_pb2.GenerateResponse:
    tokens = [generation_pb2.Token(id=token_id) for token_id in ids]
    return generation_pb2.GenerateResponse(
        chunk={"first_token_index": first, "tokens": tokens, "text_delta": "x" * len(ids)}
    )


def finished(count: int, reason: int = generation_pb2.FINISH_REASON_EOS) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        finished={"finish_reason": reason, "usage": {"output_tokens": count}}
    )


def test_times_of_merged_tokens_count_arrivals() -> None:
    clock = iter([0, 5_000_000, 9_000_000])
    turn = Turn(clock_ns=lambda: next(clock))
    for response in (started(), chunk(0, 1), chunk(1, 2, 3), finished(3)):
        turn.fold(response)
    result = turn.require_result()
    assert result.ttft_ms == 5.0
    assert result.itl_ms == (4.0, 0.0)
    assert result.text == "xxx"


def test_no_tokens_no_times() -> None:
    turn = Turn()
    for response in (started(), finished(0, generation_pb2.FINISH_REASON_CANCELLED)):
        turn.fold(response)
    assert (turn.require_result().ttft_ms, turn.require_result().itl_ms) == (None, ())


def test_what_a_newer_server_adds_is_passed_over() -> None:
    turn = Turn()
    for response in (started(), generation_pb2.GenerateResponse(), finished(0, 99)):
        assert turn.fold(response) is None
    assert turn.require_result().finish_reason is pagecast.FinishReason.UNSPECIFIED


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([chunk(0, 1)], "out of order"),
        ([started(), started()], "out of order"),
        ([started(), chunk(1, 5)], "token 0 was due, 1 came"),
        ([started(), chunk(0, 5), chunk(0, 5)], "token 1 was due, 0 came"),
        ([started(), chunk(0, 5), finished(2)], "2 tokens were sent, 1 came"),
        ([started(), finished(0), chunk(0, 1)], "out of order"),
        ([started(), chunk(0, 5)], "closed before its last event"),
        ([], "closed before its last event"),
    ],
)
async def test_broken_streams(fake: FakeServer, script: list[Any], message: str) -> None:
    fake.script = script
    with pagecast.Client(fake.target) as client:
        generation = client.open_session("tiny").generate("a")
        with pytest.raises(pagecast.BrokenStream, match=message):
            generation.wait()
    async with pagecast.AsyncClient(fake.target) as aclient:
        with pytest.raises(pagecast.BrokenStream, match=message):
            await (await aclient.open_session("tiny")).generate("a").wait()


def test_kinds_of_input() -> None:
    def sent(content: Any, *, raw: bool = False) -> session_pb2.Input | None:
        request = _requests.generate("ses_0", content, raw=raw)
        return request.input if request.HasField("input") else None

    assert sent(None) is None
    assert sent("a", raw=True) == session_pb2.Input(text="a")
    assert sent((3, 4)) == session_pb2.Input(token_ids={"ids": [3, 4]})
    messages = [pagecast.Message("system", "s"), pagecast.Message("assistant", "a")]
    assert sent(messages) == session_pb2.Input(
        messages={
            "messages": [
                {"role": session_pb2.ROLE_SYSTEM, "content": "s"},
                {"role": session_pb2.ROLE_ASSISTANT, "content": "a"},
            ]
        }
    )


def test_an_empty_text_is_sent_for_the_server_to_refuse() -> None:
    assert _requests.generate("ses_0", "", raw=True).input.WhichOneof("content") == "text"


@pytest.mark.parametrize(
    ("content", "raw", "error"), [([], False, ValueError), ([1], True, TypeError), (None, True, TypeError)]
)
def test_inputs_that_cannot_be_sent(content: Any, *, raw: bool, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"input|raw"):
        _requests.generate("ses_0", content, raw=raw)


def test_unset_options_are_not_sent() -> None:
    assert (
        _requests.open_session("tiny").ListFields()
        == session_pb2.OpenSessionRequest(model="tiny").ListFields()
    )
    fields = {descriptor.name for descriptor, _ in _requests.generate("ses_0", None).ListFields()}
    assert fields == {"session_id", "response"}
    assert _requests.generate("ses_0", None, temperature=0.0).sampling.HasField("temperature")
