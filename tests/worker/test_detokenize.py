import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.detokenize import Detokenizer

EMOJI = "👩‍🚀".encode()
VOCABULARY = [
    *(bytes([byte]) for byte in range(256)),
    b"",  # a control token
    b"hello",
    " blå".encode(),
    EMOJI[:2],
    EMOJI[2:9],
    EMOJI[9:],
    b"\xf0\x9f\x91",
    b"\xff\xfe",
    "é".encode()[1:] + b"a",
]

pieces = st.lists(
    st.one_of(
        st.integers(0, len(VOCABULARY) - 1).map(lambda token_id: [token_id]),
        st.text(max_size=4).map(lambda text: list(text.encode())),
        st.just([259, 260, 261]),
    ),
    max_size=20,
).map(lambda lists: [token_id for ids in lists for token_id in ids])


@given(pieces)
def test_s28_deltas_concatenate_to_the_decoding_of_all_ids(ids: list[int]) -> None:
    detokenizer = Detokenizer(VOCABULARY.__getitem__)
    deltas = [detokenizer.push(token_id) for token_id in ids]
    whole = b"".join(VOCABULARY[token_id] for token_id in ids).decode("utf-8", "replace")
    assert "".join(deltas) + detokenizer.finish() == whole


def test_s28_a_split_emoji_is_held_back_until_it_is_whole() -> None:
    detokenizer = Detokenizer(VOCABULARY.__getitem__)
    assert [detokenizer.push(byte) for byte in "🙂".encode()] == ["", "", "", "🙂"]
    assert detokenizer.finish() == ""


def test_s28_an_emoji_of_several_characters_comes_one_by_one() -> None:
    detokenizer = Detokenizer(VOCABULARY.__getitem__)
    assert [detokenizer.push(token_id) for token_id in (259, 260, 261)] == ["", "👩\u200d", "🚀"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        (b"\xf0\x9f\x99", "\ufffd"),  # a character cut short is one replacement
        (b"\xe2\x82", "\ufffd"),
        (b"\xf0\x80", "\ufffd\ufffd"),  # no character begins so
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),  # a surrogate
        (b"\x80", "\ufffd"),
        (b"\xc3", "\ufffd"),
    ],
)
def test_s28_broken_bytes_at_the_end_become_replacements(tail: bytes, text: str) -> None:
    detokenizer = Detokenizer(VOCABULARY.__getitem__)
    deltas = [detokenizer.push(byte) for byte in b"ok" + tail]
    assert "".join(deltas) + detokenizer.finish() == "ok" + text


def test_broken_bytes_do_not_hold_back_what_follows() -> None:
    detokenizer = Detokenizer(VOCABULARY.__getitem__)
    assert [detokenizer.push(byte) for byte in b"\xe2\x82a"] == ["", "", "\ufffda"]


def test_a_cut_character_is_flushed_as_a_replacement() -> None:
    detokenizer = Detokenizer(VOCABULARY.__getitem__)
    assert detokenizer.push(258) == " blå"
    assert detokenizer.push(0xF0) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_control_token_inside_a_character_adds_nothing() -> None:
    detokenizer = Detokenizer(VOCABULARY.__getitem__)
    assert [detokenizer.push(token_id) for token_id in (0xC3, 256, 0xA9)] == ["", "", "é"]


def test_an_unknown_id_is_the_vocabularys_error() -> None:
    with pytest.raises(IndexError):
        Detokenizer(VOCABULARY.__getitem__).push(len(VOCABULARY))
