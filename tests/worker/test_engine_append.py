"""The engine thread over a real tiny model: input that is appended ahead of a turn, and chats over it."""

import pytest

from pagecast.v1 import session_pb2
from tests.worker.engine_harness import Harness, finished, token_ids
from worker import commands
from worker.batch import Finished, FinishReason
from worker.errors import Refused
from worker.intake import Intake
from worker.model.chat import ChatTemplate
from worker.model.weights.gguf import GgufFile
from worker.params import Sampling


@pytest.fixture
def intake(harness: Harness, file: GgufFile) -> Intake:
    assert file.tokenizer.chat_template is not None
    return Intake(harness.tokenizer, ChatTemplate(file.tokenizer.chat_template, harness.tokenizer))


def say(
    harness: Harness, intake: Intake, name: str, *messages: tuple[str, str], append: bool = False
) -> Finished:
    """Run one turn of messages, greedily; its end."""
    roles = {"system": session_pb2.ROLE_SYSTEM, "user": session_pb2.ROLE_USER}
    source = session_pb2.Input(
        messages=session_pb2.Messages(
            messages=[session_pb2.Message(role=roles[role], content=text) for role, text in messages]
        )
    )
    prepared = intake.prepare(source, harness.engine.turn_base(name), opens_reply=not append)
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


def test_an_append_that_is_cancelled_never_happened(harness: Harness) -> None:
    harness.open("a")
    harness.submit("a", tuple(range(400)), appends_only=True)
    harness.ask(commands.Cancel("a", "g-a"))
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


def test_a_turn_without_input_after_appended_messages_opens_no_reply(
    harness: Harness, intake: Intake
) -> None:
    """It continues the log as it is, and what it adds is no reply that the template knows."""
    harness.open("a")
    say(harness, intake, "a", ("user", "hello"), append=True)
    base = harness.engine.turn_base("a")
    prepared = intake.prepare(None, base)
    assert (prepared.token_ids, prepared.conversation.is_raw) == ((), True)
    harness.run("a", (), conversation=prepared.conversation, max_tokens=2)
    with pytest.raises(Refused, match="MIXED_INPUT"):
        say(harness, intake, "a", ("user", "hello"))
