"""Messages that are appended ahead of a turn, and the reply that is opened behind them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.model.test_chat import CHAT, PLAIN, TINY, safe, user
from worker.model.chat import ChatTemplate, Conversation, Message, TemplateNotIncremental


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), safe), min_size=2, max_size=5),
    st.integers(1, 4),
    st.sampled_from(["no reply", "closed reply", "cut reply"]),
)
def test_messages_in_pieces_are_the_log_of_messages_at_once(
    said: list[tuple[str, str]], piece: int, before: str
) -> None:
    messages = tuple(Message(role, content) for role, content in said)
    start, log = Conversation(), []
    if before != "no reply":
        turn = CHAT.open_turn(Conversation(), user("q"))
        start = turn.conversation.after_reply(closed_by_eos=before == "closed reply")
    conversation = start
    for first in range(0, len(messages), piece):
        is_last = first + piece >= len(messages)
        turn = CHAT.open_turn(conversation, messages[first : first + piece], opens_reply=is_last)
        log += turn.token_ids
        conversation = turn.conversation
    whole = CHAT.open_turn(start, messages)
    assert (tuple(log), conversation) == (whole.token_ids, whole.conversation)


def test_appended_messages_open_no_reply() -> None:
    turn = CHAT.open_turn(Conversation(), user("a"), opens_reply=False)
    assert list(turn.token_ids) == TINY.encode_template("<s>user\na</s>\n", "\ue000")
    assert turn.conversation.num_appended == 1


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user"]), safe), min_size=1, max_size=4),
    st.sampled_from(["no reply", "closed reply", "cut reply"]),
)
def test_a_reply_that_is_opened_behind_messages_is_the_log_of_one_turn(
    said: list[tuple[str, str]], before: str
) -> None:
    messages = tuple(Message(role, content) for role, content in said)
    start = Conversation()
    if before != "no reply":
        turn = CHAT.open_turn(Conversation(), user("q"))
        start = turn.conversation.after_reply(closed_by_eos=before == "closed reply")
    appended = CHAT.open_turn(start, messages, opens_reply=False)
    opened = CHAT.open_reply(appended.conversation)
    whole = CHAT.open_turn(start, messages)
    assert opened.token_ids
    assert (*appended.token_ids, *opened.token_ids) == whole.token_ids
    assert opened.conversation == whole.conversation


def test_there_is_nothing_to_open_without_appended_messages() -> None:
    opened = CHAT.open_turn(Conversation(), user("a")).conversation
    for conversation in (
        Conversation(),
        opened.after_reply(closed_by_eos=False),
        opened.with_raw_input("raw text"),
    ):
        with pytest.raises(ValueError, match="no messages wait"):
            CHAT.open_reply(conversation)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | length }}" + PLAIN,
        PLAIN.replace("</s>", "{{ '</s>' if not loop.last or add_generation_prompt }}"),
    ],
)
def test_a_template_that_changes_appended_messages_is_refused(source: str) -> None:
    chat = ChatTemplate(source, TINY)
    opened = chat.open_turn(Conversation(), user("a"), opens_reply=False).conversation
    with pytest.raises(TemplateNotIncremental, match="appended"):
        chat.open_turn(opened, user("b"))


def test_a_template_that_changes_messages_for_a_reply_opens_none_behind_them() -> None:
    source = PLAIN.replace("</s>", "{{ '</s>' if not loop.last or not add_generation_prompt }}")
    chat = ChatTemplate(source, TINY)
    opened = chat.open_turn(Conversation(), user("a"), opens_reply=False).conversation
    with pytest.raises(TemplateNotIncremental, match="appended"):
        chat.open_reply(opened)
