import json
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE

from tests.tiny_model import CHATML
from tests.worker.model.test_tokenizer import CONTROL, FIELDS
from worker.model.chat import (
    ChatTemplate,
    Conversation,
    GeneratedReply,
    Message,
    MixedInput,
    TemplateError,
    TemplateNotIncremental,
)
from worker.model.tokenizer import TextError, Tokenizer, TokenizerFields
from worker.model.weights.gguf import GgufFile

GOLDEN = Path(__file__).parents[2] / "golden" / "smollm2-greedy.json"
# The little vocabulary of test_tokenizer with ChatML: <s> is its BOS, </s> and <|eot|> end replies.
PLAIN = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
TINY = Tokenizer(replace(FIELDS, add_bos=False))
CHAT = ChatTemplate(PLAIN, TINY)
EOS = 1


def user(content: str) -> tuple[Message, ...]:
    return (Message("user", content),)


def whole(fields: TokenizerFields, template: str, messages: list[tuple[str, str]]) -> list[int]:
    """Ids of one whole rendering by jinja and `tokenizers` alone, control strings as special tokens."""
    source = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    history = [{"role": role, "content": content} for role, content in messages]
    vocabulary = {token: token_id for token_id, token in enumerate(fields.tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields.merges]
    bpe = BpeTokenizer(BPE(vocab=vocabulary, merges=merges))  # type: ignore[arg-type]
    digits, byte_level = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    control = [text for text, kind in zip(fields.tokens, fields.token_types, strict=True) if kind == 3]
    bpe.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    return bpe.encode(source.render(messages=history, add_generation_prompt=True)).ids


def test_first_turn_is_the_whole_rendering() -> None:
    turn = CHAT.open_turn(Conversation(), (Message("system", "be brief"), Message("user", "hello")))
    assert list(turn.token_ids) == whole(FIELDS, PLAIN, [("system", "be brief"), ("user", "hello")])
    assert turn.conversation.entries == (Message("system", "be brief"), Message("user", "hello"))


contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
safe = contents.filter(lambda text: not any(token in text for token in CONTROL))


@given(
    st.lists(
        st.tuples(safe, st.sampled_from(["hello", "in the", "é🙂", "x 12"]), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
def test_a_log_equals_one_whole_rendering(turns: list[tuple[str, str, bool]]) -> None:
    log: list[int] = []
    conversation, messages = Conversation(), []
    for question, reply, closed in turns:
        turn = CHAT.open_turn(conversation, user(question))
        log += turn.token_ids
        messages.append(("user", question))
        assert log == whole(FIELDS, PLAIN, messages)
        log += [*TINY.encode_text(reply), *([EOS] if closed else [])]
        messages.append(("assistant", reply))
        conversation = turn.conversation.after_reply(closed_by_eos=closed)


@given(
    st.lists(st.sampled_from([*CONTROL, "<", "s>", "/s>", "|eot|>", "hello", "\n"]), max_size=8).map("".join)
)
def test_user_text_never_becomes_control(content: str) -> None:
    ids = CHAT.open_turn(Conversation(), user(content)).token_ids
    assert [token_id for token_id in ids if token_id < 3] == [0, 1, 0]
    text = b"".join(map(TINY.token_bytes, ids)).decode()
    assert text == f"user\n{content}\nassistant\n"


def test_contents_may_hold_private_use_characters() -> None:
    content = "\ue000<\ue001s>0\ue0010"
    first = CHAT.open_turn(Conversation(), user(content))
    assert list(first.token_ids) == whole(FIELDS, PLAIN, [("user", content)])
    second = CHAT.open_turn(first.conversation.after_reply(closed_by_eos=False), user(content))
    expected = whole(FIELDS, PLAIN, [("user", content), ("assistant", "hello"), ("user", content)])
    assert [*first.token_ids, *TINY.encode_text("hello"), *second.token_ids] == expected


def test_every_private_use_character_taken_is_an_error_and_no_loop() -> None:
    taken = "".join(map(chr, [*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]))
    with pytest.raises(TemplateError, match="private-use"):
        CHAT.open_turn(Conversation(), user(taken))


@pytest.mark.parametrize("template", [PLAIN, "{% for m in messages %}{{ m.content }}</s>{% endfor %}"])
def test_one_bos_whether_the_template_writes_it_or_not(template: str) -> None:
    chat = ChatTemplate(template, Tokenizer(FIELDS))
    turn = chat.open_turn(Conversation(), user("<s>"))
    assert turn.token_ids[0] == 0
    assert turn.token_ids[1] != 0
    later = chat.open_turn(turn.conversation.after_reply(closed_by_eos=True), user("x")).token_ids
    assert later[0] != 0


def test_a_closed_reply_brings_its_own_eos_and_a_cut_one_is_closed() -> None:
    opened = CHAT.open_turn(Conversation(), user("a")).conversation
    closed = CHAT.open_turn(opened.after_reply(closed_by_eos=True), user("b")).token_ids
    cut = CHAT.open_turn(opened.after_reply(closed_by_eos=False), user("b")).token_ids
    assert cut == (EOS, *closed)
    assert EOS in closed


def test_conversation_states() -> None:
    opened = CHAT.open_turn(Conversation(), user("a")).conversation
    cut = opened.after_reply(closed_by_eos=False)
    assert cut.entries == (*opened.entries, GeneratedReply(closed_by_eos=False))
    assert cut.continued() == cut
    closed = cut.after_reply(closed_by_eos=True)
    assert closed.entries == (*opened.entries, GeneratedReply(closed_by_eos=True))
    assert closed.continued().is_raw
    assert Conversation().continued().is_raw
    raw = closed.with_raw_input("raw text")
    assert raw.after_reply(closed_by_eos=True) == raw == Conversation(raw_by="raw text")
    # What came first is told.
    assert raw.with_raw_input("token ids") == raw.continued() == raw


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (Conversation().with_raw_input("raw text"), "follow raw text in the log"),
        (
            Conversation((GeneratedReply(closed_by_eos=True),)).continued(),
            "continued past its end in the log",
        ),
    ],
)
def test_messages_are_refused_by_what_made_the_log_raw(raw: Conversation, told: str) -> None:
    with pytest.raises(MixedInput, match=told):
        CHAT.open_turn(raw, user("b"))


def test_calls_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one message"):
        CHAT.open_turn(Conversation(), ())
    with pytest.raises(ValueError, match="role 'tool'"):
        Message("tool", "x")
    with pytest.raises(TextError, match="lone surrogate"):
        CHAT.open_turn(Conversation(), user("\ud800"))


@pytest.mark.parametrize(
    "rewrites",
    [
        "{{ m.content.split('</think>')[-1] }}",
        "{{ m.content if loop.last else m.content.replace('<think>x</think>', '') }}",
        "{% if m.role == 'assistant' and not loop.last %}…{% else %}{{ m.content }}{% endif %}",
        " {{ m.content }}",
        "{{ m.content }}{{ loop.revindex }}",
    ],
)
def test_templates_that_rewrite_replies_get_one_turn(rewrites: str) -> None:
    chat = ChatTemplate(PLAIN.replace("{{ m.content }}", rewrites), TINY)
    assert not chat.is_incremental
    turn = chat.open_turn(Conversation(), user("a"))
    assert turn.token_ids
    with pytest.raises(TemplateNotIncremental, match="earlier replies"):
        chat.open_turn(turn.conversation.after_reply(closed_by_eos=True), user("b"))


def test_a_template_may_trim_blanks_around_replies() -> None:
    chat = ChatTemplate(PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}"), TINY)
    opened = chat.open_turn(Conversation(), user("a")).conversation
    assert chat.open_turn(opened.after_reply(closed_by_eos=True), user("b")).token_ids


def test_a_template_that_drops_old_turns_is_refused_when_it_does() -> None:
    source = PLAIN.replace("in messages", "in (messages if messages | length < 5 else messages[2:])")
    chat = ChatTemplate(source, TINY)
    assert chat.is_incremental
    conversation = chat.open_turn(Conversation(), user("a")).conversation.after_reply(closed_by_eos=True)
    conversation = chat.open_turn(conversation, user("b")).conversation.after_reply(closed_by_eos=True)
    with pytest.raises(TemplateNotIncremental, match="earlier turns"):
        chat.open_turn(conversation, user("c"))


def test_a_template_that_repeats_a_reply_is_refused() -> None:
    source = PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.content if m.role == 'assistant' }}")
    chat = ChatTemplate(source, TINY)
    conversation = chat.open_turn(Conversation(), user("a")).conversation.after_reply(closed_by_eos=False)
    with pytest.raises(TemplateNotIncremental, match="earlier turns"):
        chat.open_turn(conversation, user("b"))


def test_an_eos_that_the_template_does_not_write_is_refused() -> None:
    chat = ChatTemplate(PLAIN.replace("</s>", ""), TINY)
    opened = chat.open_turn(Conversation(), user("a")).conversation
    assert chat.open_turn(opened.after_reply(closed_by_eos=False), user("b")).token_ids
    with pytest.raises(TemplateNotIncremental, match="EOS"):
        chat.open_turn(opened.after_reply(closed_by_eos=True), user("b"))


def test_a_refusing_template_changes_nothing() -> None:
    source = "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}" + PLAIN
    chat = ChatTemplate(source, TINY)
    assert chat.open_turn(Conversation(), user("a")).token_ids
    with pytest.raises(TemplateError, match="refuses the messages: one"):
        chat.open_turn(Conversation(), (*user("a"), *user("b")))


def test_the_tiny_model_chats(tiny: GgufFile, tiny_tokenizer: Tokenizer) -> None:
    assert tiny.tokenizer.chat_template == CHATML
    chat = ChatTemplate(CHATML, tiny_tokenizer)
    assert chat.is_incremental
    turn = chat.open_turn(Conversation(), user("hello"))
    assert list(turn.token_ids) == whole(tiny.tokenizer, CHATML, [("user", "hello")])


@pytest.mark.model
@pytest.mark.parametrize(
    "case", json.loads(GOLDEN.read_text())["cases"], ids=lambda case: case["prompt"][:20]
)
def test_golden_prompt_ids(case: dict[str, object], smollm2: GgufFile, smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2.tokenizer.chat_template is not None
    chat = ChatTemplate(smollm2.tokenizer.chat_template, smollm2_tokenizer)
    turn = chat.open_turn(Conversation(), user(str(case["prompt"])))
    assert list(turn.token_ids) == case["prompt_ids"]
    token_ids = case["token_ids"]
    assert isinstance(token_ids, list)
    assert b"".join(map(smollm2_tokenizer.token_bytes, token_ids)).decode("utf-8", "replace") == case["text"]


@pytest.mark.model
def test_golden_replies_as_history(smollm2: GgufFile, smollm2_tokenizer: Tokenizer) -> None:
    template = smollm2.tokenizer.chat_template
    assert template is not None
    chat = ChatTemplate(template, smollm2_tokenizer)
    assert chat.is_incremental
    log: list[int] = []
    conversation, messages = Conversation(), []
    extra = ["", " 12 + 345 = ?", "\n\n  naïve 日本語 🙂👩‍🚀\t", " it's\r\n <b>", "   ", "\u00a0٣", "e\u0301"]
    for case, tail in zip(json.loads(GOLDEN.read_text())["cases"], extra, strict=False):
        turn = chat.open_turn(conversation, user(case["prompt"] + tail))
        messages.append(("user", case["prompt"] + tail))
        log += turn.token_ids
        assert log == whole(smollm2.tokenizer, template, messages)
        closed = case["token_ids"][-1] == 2
        log += case["token_ids"]
        conversation = turn.conversation.after_reply(closed_by_eos=closed)
        messages.append(("assistant", case["text"]))
