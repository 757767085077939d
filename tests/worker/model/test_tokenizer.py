from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_model import MERGES, byte_characters
from worker.model.config import ModelFileError
from worker.model.tokenizer import TextError, Tokenizer, TokenizerFields, TokenType
from worker.model.weights.gguf import GgufFile

CONTROL = ("<s>", "</s>", "<|eot|>")
WORDS = tuple(byte_characters() + [merge.replace(" ", "") for merge in MERGES])
FIELDS = TokenizerFields(
    model="gpt2",
    pre="smollm",
    tokens=CONTROL + WORDS,
    token_types=(TokenType.CONTROL,) * 3 + (TokenType.NORMAL,) * len(WORDS),
    merges=MERGES,
    bos_id=0,
    eos_id=1,
    eot_id=2,
    eom_id=None,
    unk_id=None,
    add_bos=True,
    chat_template=None,
)
TINY = Tokenizer(FIELDS)
MARKER = "\ue000"


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode() for token_id in ids]


def test_facts() -> None:
    assert TINY.vocab_size == len(FIELDS.tokens)
    assert TINY.eos_ids == {1, 2}
    assert (TINY.bos_id, TINY.add_bos, TINY.log_prefix) == (0, True, (0,))
    assert Tokenizer(replace(FIELDS, add_bos=False)).log_prefix == ()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_text_round_trips_and_never_becomes_control(text: str) -> None:
    ids = TINY.encode_text(text)
    assert decode(TINY, ids) == text
    assert not {0, 1, 2} & set(ids)


@given(
    st.lists(st.sampled_from([*CONTROL, "<", "s>", "|eot", "|>", "hello", " ", "\n"]), max_size=8).map(
        "".join
    )
)
def test_protected_text_in_a_template_stays_text(content: str) -> None:
    rendered = f"<s>{TINY.protect(content, MARKER)}</s>"
    assert TINY.encode_template(rendered, MARKER) == [0, *TINY.encode_text(content), 1]


def test_template_text_becomes_control_and_borders_merge_as_in_the_whole_string() -> None:
    ids = TINY.encode_template(f"<s>hel{TINY.protect('lo', MARKER)}<|eot|>", MARKER)
    assert ids == [0, FIELDS.tokens.index("hello"), 2]


def test_longest_control_string_wins() -> None:
    tokens = ("<s>", "</s>", "</s>>", *WORDS)
    tokenizer = Tokenizer(replace(FIELDS, tokens=tokens))
    assert tokenizer.encode_template("</s>></s>", MARKER) == [2, 1]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 123", ["it", "'s", " 123"]),
        ("default", "it's 123", ["it", "'s", " 123"]),
        ("smollm", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
        ("llama-bpe", "it's 12345", ["it", "'s", " ", "123", "45"]),
        ("llama-bpe", "IT'S\n\n x", ["IT", "'S", "\n\n", " x"]),
        ("gpt-2", "a   b\n\nc", ["a", "  ", " b", "\n", "\n", "c"]),
    ],
)
def test_word_rules(pre: str, text: str, words: list[str]) -> None:
    # With every prefix of every word a token, the ids are the words.
    prefixes = {
        word[:end].replace(" ", "Ġ").replace("\n", "Ċ") for word in words for end in range(2, len(word) + 1)
    }
    longer = tuple(sorted(prefixes, key=len))
    tokens = tuple(byte_characters()) + longer
    tokenizer = Tokenizer(
        TokenizerFields(
            model="gpt2",
            pre=pre,
            tokens=tokens,
            token_types=(TokenType.NORMAL,) * len(tokens),
            merges=tuple(f"{word[:-1]} {word[-1]}" for word in longer),
            bos_id=None,
            eos_id=None,
            eot_id=None,
            eom_id=None,
            unk_id=None,
            add_bos=False,
            chat_template=None,
        )
    )
    assert texts(tokenizer, tokenizer.encode_text(text)) == words


def test_llama_bpe_takes_a_whole_word_before_merges() -> None:
    tokens = (*FIELDS.tokens, "abc")
    fields = replace(FIELDS, tokens=tokens, token_types=(*FIELDS.token_types, TokenType.NORMAL))
    assert Tokenizer(replace(fields, pre="llama-bpe")).encode_text("abc") == [len(tokens) - 1]
    assert len(Tokenizer(fields).encode_text("abc")) == 3


def test_user_defined_tokens_are_text_but_those_that_look_like_control_are_not() -> None:
    tokens = (*FIELDS.tokens, "<think>", "<|im_end|>")
    fields = replace(FIELDS, tokens=tokens, token_types=(*FIELDS.token_types, *[TokenType.USER_DEFINED] * 2))
    tokenizer = Tokenizer(fields)
    think, end = len(tokens) - 2, len(tokens) - 1
    assert tokenizer.encode_text("a<think>") == [*TINY.encode_text("a"), think]
    assert tokenizer.token_bytes(think) == b"<think>"
    assert end not in tokenizer.encode_text("<|im_end|>")
    assert tokenizer.encode_template("<|im_end|>", MARKER) == [end]
    assert tokenizer.token_bytes(end) == b""


def test_unused_tail_is_padding() -> None:
    tokens = (*FIELDS.tokens, "[PAD0]", "[PAD1]")
    fields = replace(FIELDS, tokens=tokens, token_types=(*FIELDS.token_types, *[TokenType.UNUSED] * 2))
    assert Tokenizer(fields).vocab_size == len(FIELDS.tokens)
    assert Tokenizer(fields).token_bytes(len(tokens) - 1) == b""


def test_bad_text_is_named() -> None:
    with pytest.raises(TextError, match="lone surrogate at character 2"):
        TINY.encode_text("ab\ud800c")
    without = replace(
        FIELDS, token_types=(*FIELDS.token_types[:3], TokenType.UNUSED, *FIELDS.token_types[4:])
    )
    assert Tokenizer(without).encode_text("ab") == TINY.encode_text("ab")
    with pytest.raises(TextError, match=r"U\+0000 at character 1"):
        Tokenizer(without).encode_text("a\x00")


@pytest.mark.parametrize("token_id", [-1, len(FIELDS.tokens)])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match="token id"):
        TINY.token_bytes(token_id)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model 'llama'"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre 'qwen2'"),
        ({"eos_id": 9999}, "tokenizer.ggml.eos_token_id is 9999"),
        ({"bos_id": -1}, "tokenizer.ggml.bos_token_id is -1"),
        ({"bos_id": None}, "tokenizer.ggml.add_bos_token is set"),
        ({"token_types": FIELDS.token_types[1:]}, "tokenizer.ggml.token_type has"),
        ({"tokens": (*FIELDS.tokens[:-1], "a")}, "tokenizer.ggml.tokens holds a token twice"),
        ({"merges": (*MERGES, "x y")}, "tokenizer.ggml.merges: 'x y'"),
        ({"merges": (*MERGES, "xy")}, "tokenizer.ggml.merges: 'xy'"),
    ],
)
def test_fields_that_do_not_fit_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer(replace(FIELDS, **changes))  # type: ignore[arg-type]


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, world!", ["Hello", ",", " world", "!"]),
        ("call 911 now", ["call", " ", "9", "1", "1", " now"]),
        ("<|im_end|>", ["<", "|", "im", "_", "end", "|", ">"]),
        ("a    b\n\n\tc", ["a", "   ", " b", "\n\n", "\t", "c"]),
    ],
)
def test_smollm2_words(smollm2_tokenizer: Tokenizer, text: str, words: list[str]) -> None:
    assert texts(smollm2_tokenizer, smollm2_tokenizer.encode_text(text)) == words


@pytest.mark.model
@given(st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cs", "Cc", "Cn"]), max_size=40))
def test_smollm2_round_trips(smollm2_tokenizer: Tokenizer, text: str) -> None:
    try:
        ids = smollm2_tokenizer.encode_text(text)
    except TextError:
        # Bytes that this vocabulary lacks; what it has is never refused.
        assert any(byte in smollm2_tokenizer._missing_bytes for byte in text.encode())
        return
    assert decode(smollm2_tokenizer, ids) == text
    assert all(token_id >= 17 for token_id in ids)


@pytest.mark.model
def test_smollm2_facts(smollm2: GgufFile, smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.vocab_size == smollm2.config.vocab_size == 49152
    assert smollm2_tokenizer.eos_ids == {2}
    assert (smollm2_tokenizer.bos_id, smollm2_tokenizer.add_bos) == (1, False)
    assert smollm2_tokenizer.token_bytes(2) == b""
    with pytest.raises(TextError, match=r"U\+0013 at character 5"):
        smollm2_tokenizer.encode_text("hello\x13")
