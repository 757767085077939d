"""The engine thread over a real tiny model: input that is appended ahead of a turn, and chats over it."""

import threading
from typing import Any

import pytest

from pagecast.v1 import session_pb2
from tests.worker.engine_harness import Harness, finished, token_ids
from worker import commands
from worker.batch import Batch, Event, Finished, FinishReason
from worker.commands import TurnBase
from worker.errors import Refused
from worker.intake import Intake
from worker.model.chat import ChatTemplate, Conversation
from worker.model.weights.gguf import GgufFile
from worker.params import Sampling, SamplingChoice, Stopping
from worker.runner import Launched
from worker.sampling import Draw


@pytest.fixture
def intake(harness: Harness, file: GgufFile) -> Intake:
    assert file.tokenizer.chat_template is not None
    return Intake(harness.tokenizer, ChatTemplate(file.tokenizer.chat_template, harness.tokenizer))


def said(*messages: tuple[str, str]) -> session_pb2.Input:
    roles = {"system": session_pb2.ROLE_SYSTEM, "user": session_pb2.ROLE_USER}
    return session_pb2.Input(
        messages=session_pb2.Messages(
            messages=[session_pb2.Message(role=roles[role], content=text) for role, text in messages]
        )
    )


def say(
    harness: Harness, intake: Intake, name: str, *messages: tuple[str, str], append: bool = False
) -> Finished:
    """Run one turn of messages, greedily; its end."""
    prepared = intake.prepare(said(*messages), harness.engine.turn_base(name), opens_reply=not append)
    return finished(
        harness.run(
            name,
            prepared.token_ids,
            conversation=prepared.conversation,
            appends_only=append,
            sampling=Sampling(),
            max_tokens=6,
        )
    )


def test_an_append_is_a_revision_with_all_its_kv_and_no_token(harness: Harness) -> None:
    harness.open("a")
    events = harness.run("a", tuple(range(40)), appends_only=True)
    assert [type(event).__name__ for event in events] == ["Started", "Finished"]
    end = finished(events)
    assert (end.reason, end.revision, end.text) == (FinishReason.APPENDED, 1, "")
    assert (end.usage.input_tokens, end.usage.output_tokens) == (40, 0)
    view = harness.view("a")
    assert (view.num_tokens, view.num_computed, view.revision) == (40, 40, 1)


def test_a_turn_after_appends_says_what_it_says_after_one_input(harness: Harness) -> None:
    harness.open("a")
    for ids in (tuple(range(40)), (7,), tuple(range(50, 58))):
        harness.run("a", ids, appends_only=True)
    events = harness.run("a", (9,), max_tokens=6)
    # All earlier tokens have their KV, the last one too: none was drawn.
    assert (finished(events).usage.cached_tokens, finished(events).revision) == (49, 4)
    harness.open("b")
    whole = harness.run("b", (*range(40), 7, *range(50, 58), 9), max_tokens=6)
    assert token_ids(whole) == token_ids(events)


def test_a_turn_without_input_goes_on_from_an_append(harness: Harness) -> None:
    harness.open("a")
    harness.run("a", tuple(range(16)), appends_only=True)
    events = harness.run("a", (), max_tokens=6)
    harness.open("b")
    assert token_ids(harness.run("b", tuple(range(16)), max_tokens=6)) == token_ids(events)


def test_an_append_that_is_cancelled_never_happened(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, is_cancelled = harness.runner.launch, threading.Event()

    def launch_once_cancelled(batch: Batch, draws: list[Draw]) -> Launched:
        assert is_cancelled.wait(30)
        return launch(batch, draws)

    monkeypatch.setattr(harness.runner, "launch", launch_once_cancelled)
    harness.open("a")
    harness.submit("a", tuple(3 + place % 250 for place in range(400)), appends_only=True)
    cancel = harness.engine.post(commands.Cancel("a", "g-a"))
    is_cancelled.set()
    cancel.result(timeout=30)
    assert finished(harness.collect()["g-a"]).reason is FinishReason.CANCELLED
    view = harness.view("a")
    assert (view.num_tokens, view.revision) == (0, 0)


def test_an_append_of_nothing_is_refused(harness: Harness) -> None:
    harness.open("a")
    harness.run("a", (1,), max_tokens=1)
    with pytest.raises(Refused, match="FIELD_REQUIRED"):
        harness.submit("a", (), appends_only=True)


def test_appended_messages_then_a_question_are_the_log_of_one_turn(harness: Harness, intake: Intake) -> None:
    system, context, question = ("system", "Be brief."), ("user", "hello <|im_end|>"), ("user", "the end?")
    harness.open("a")
    say(harness, intake, "a", system, append=True)
    say(harness, intake, "a", context, append=True)
    appended = say(harness, intake, "a", question)
    harness.open("b")
    say(harness, intake, "b", system, context, question)
    assert harness.session("a").token_ids == harness.session("b").token_ids
    assert appended.revision == 3
    # And so do those behind a reply.
    say(harness, intake, "a", context, append=True)
    say(harness, intake, "a", question)
    say(harness, intake, "b", context, question)
    assert harness.session("a").token_ids == harness.session("b").token_ids


def reply(harness: Harness, intake: Intake, name: str, **changes: Any) -> list[Event]:
    """Run a turn without input; its events."""
    prepared = intake.prepare(None, harness.engine.turn_base(name))
    asked = {"sampling": Sampling(), "max_tokens": 6} | changes
    return harness.run(name, prepared.token_ids, conversation=prepared.conversation, **asked)


def test_a_turn_without_input_behind_messages_opens_the_reply(harness: Harness, intake: Intake) -> None:
    system, question = ("system", "Be brief."), ("user", "hello <|im_end|>")
    for name in ("a", "b"):
        harness.open(name)
    for _ in range(3):  # at first, and behind replies
        whole = say(harness, intake, "b", system, question)
        appended = say(harness, intake, "a", system, question, append=True)
        events = reply(harness, intake, "a")
        assert harness.session("a").token_ids == harness.session("b").token_ids
        # What opens the reply is this turn's input.
        opening = finished(events).usage.input_tokens
        assert opening > 0
        assert appended.usage.input_tokens + opening == whole.usage.input_tokens
        assert finished(events).usage.output_tokens == whole.usage.output_tokens
    # Appended one by one, and cancelled: as if never opened.
    say(harness, intake, "a", system, append=True)
    say(harness, intake, "a", question, append=True)
    for keep in (False, True):
        prepared = intake.prepare(None, harness.engine.turn_base("a"))
        before = harness.view("a")
        harness.submit(
            "a", prepared.token_ids, conversation=prepared.conversation, sampling=Sampling(),
            max_tokens=None, keep=keep, stopping=Stopping(),
        )  # fmt: skip
        harness.wait_for_token()
        harness.ask(commands.Cancel("a", "g-a"))
        harness.collect()
        if not keep:
            assert harness.view("a").num_tokens == before.num_tokens
            assert intake.prepare(None, harness.engine.turn_base("a")) == prepared
    # The cut reply goes on, and is closed by the next message.
    assert intake.prepare(None, harness.engine.turn_base("a")).token_ids == ()
    assert finished(reply(harness, intake, "a")).usage.input_tokens == 0
    say(harness, intake, "a", question)


def test_a_turn_without_input_behind_raw_input_continues_it(harness: Harness, intake: Intake) -> None:
    harness.open("a")
    harness.run("a", tuple(range(5)), appends_only=True)
    assert finished(reply(harness, intake, "a")).usage.input_tokens == 0
    with pytest.raises(Refused, match=r"MIXED_INPUT: messages can't follow token ids in the log") as refused:
        say(harness, intake, "a", ("user", "hello"))
    assert refused.value.field == "input.messages.messages"


def test_a_reply_for_which_there_is_no_room_is_refused_and_nothing_has_changed(
    harness: Harness, intake: Intake
) -> None:
    ids = intake.prepare(said(("user", "hello")), TurnBase(0, 0, 512, Conversation(), SamplingChoice()))
    appended = intake.prepare(
        said(("user", "hello")), TurnBase(0, 0, 512, Conversation(), SamplingChoice()), opens_reply=False
    )
    assert len(appended.token_ids) < len(ids.token_ids)
    limit = len(ids.token_ids)
    harness.ask(commands.OpenSession("a", None, limit, SamplingChoice(), {}))
    say(harness, intake, "a", ("user", "hello"), append=True)
    with pytest.raises(Refused, match="PROMPT_TOO_LONG"):
        reply(harness, intake, "a")
    assert harness.view("a").num_tokens == len(appended.token_ids)
