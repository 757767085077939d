"""Inputs to token ids: what is refused, what users' text can't do, and the way back."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagecast.v1 import session_pb2
from tests.tiny_model import write_tiny_gguf
from worker.errors import Refused
from worker.intake import Intake
from worker.model.chat import ChatTemplate
from worker.model.tokenizer import Tokenizer
from worker.model.weights.gguf import read_gguf

BOS, START, EOS = 0, 1, 2


def make(path: Path, *, add_bos: bool = False, chat_template: str | None = None) -> Intake:
    fields = read_gguf(write_tiny_gguf(path, add_bos=add_bos, chat_template=chat_template)).tokenizer
    tokenizer = Tokenizer(fields)
    template = fields.chat_template
    return Intake(tokenizer, None if template is None else ChatTemplate(template, tokenizer))


BOS_TEMPLATE = "<|endoftext|>{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    return make(tmp_path_factory.mktemp("intake") / "tiny.gguf", add_bos=True, chat_template=BOS_TEMPLATE)


def text(value: str) -> session_pb2.Input:
    return session_pb2.Input(text=value)


def ids(*values: int) -> session_pb2.Input:
    return session_pb2.Input(token_ids=session_pb2.TokenIds(ids=values))


def messages(*contents: str, role: int = session_pb2.ROLE_USER) -> session_pb2.Input:
    said = [session_pb2.Message(role=role, content=content) for content in contents]  # type: ignore[arg-type]
    return session_pb2.Input(messages=session_pb2.Messages(messages=said))


def test_s29_one_bos_with_the_template_and_without(intake: Intake) -> None:
    for source in (text("hello"), messages("hello")):
        found = intake.tokenize(source, max_tokens=100)
        assert (found[0], found.count(BOS)) == (BOS, 1)
    # Ids are taken as they are.
    assert intake.tokenize(ids(7, 8), max_tokens=100) == (7, 8)


@pytest.mark.parametrize("control", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
def test_s30_text_of_users_never_becomes_a_control_token(intake: Intake, control: str) -> None:
    plain = intake.tokenize(text(f"a{control}b"), max_tokens=100)
    assert {BOS, START, EOS} & set(plain[1:]) == set()
    chat = intake.tokenize(messages(f"a{control}b"), max_tokens=100)
    assert [token for token in chat if token <= EOS] == [BOS, START, EOS]
    for found in (plain, chat):
        assert control in intake.detokenize(found, max_tokens=100)


@pytest.mark.parametrize(
    ("source", "reason", "field"),
    [
        (session_pb2.Input(), "INPUT_EMPTY", "input"),
        (text(""), "INPUT_EMPTY", "input.text"),
        (ids(), "INPUT_EMPTY", "input.token_ids.ids"),
        (messages(), "INPUT_EMPTY", "input.messages.messages"),
        (ids(1, 272), "FIELD_OUT_OF_RANGE", "input.token_ids.ids"),
        (ids(2**32 - 1), "FIELD_OUT_OF_RANGE", "input.token_ids.ids"),
        (messages("a", role=9), "FIELD_INVALID", "input.messages.messages[0].role"),
        (ids(*[7] * 51), "PROMPT_TOO_LONG", "input"),
        (text("x" * 51), "PROMPT_TOO_LONG", "input"),
        (text("y" * 10_000_000), "PROMPT_TOO_LONG", "input"),
        (messages("z" * 48), "PROMPT_TOO_LONG", "input"),
    ],
)
def test_s25_s26_inputs_that_are_refused(
    intake: Intake, source: session_pb2.Input, reason: str, field: str
) -> None:
    with pytest.raises(Refused) as caught:
        intake.tokenize(source, max_tokens=50)
    assert (caught.value.reason, caught.value.field) == (reason, field)


def test_a_model_without_a_template_takes_no_messages(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="TEMPLATE_ERROR"):
        make(tmp_path / "plain.gguf").tokenize(messages("a"), max_tokens=50)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_s28_text_comes_back_whole(intake: Intake, value: str) -> None:
    assert intake.detokenize(intake.tokenize(text(value), max_tokens=1000), max_tokens=1000) == value


def test_ids_that_are_no_tokens_have_no_text(intake: Intake) -> None:
    assert intake.detokenize((), max_tokens=3) == ""
    assert intake.detokenize((BOS, START, EOS), max_tokens=3) == ""
    for ids_ in ((1, 272), (1, 1, 1, 1)):
        with pytest.raises(Refused, match="FIELD_OUT_OF_RANGE") as caught:
            intake.detokenize(ids_, max_tokens=3)
        assert caught.value.field == "token_ids"
