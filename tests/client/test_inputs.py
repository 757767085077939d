"""What can be sent as input, and how what cannot is refused."""

import array
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import pagecast
from pagecast import _requests
from tests.client.test_requests import SURROGATE, Index

ACCEPTED = "a str, a sequence of int, a sequence of Message, or None"


@pytest.mark.parametrize(
    "content",
    [b"ab", bytearray(b"ab"), memoryview(b"ab"), 5, 5.0, object(), {1, 2}, {1: 2}, iter([1]),
     pagecast.Message("user", "a")],
)  # fmt: skip
def test_inputs_of_the_wrong_kind(content: Any) -> None:
    with pytest.raises(TypeError, match=f"^input: expected {ACCEPTED}, got {type(content).__name__}$"):
        _requests.generate("ses_0", content)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ([1, 2.0], TypeError, f"input: expected {ACCEPTED}; item 1 is float"),
        ([True], TypeError, f"input: expected {ACCEPTED}; item 0 is bool"),
        (["a"], TypeError, f"input: expected {ACCEPTED}; item 0 is str"),
        ([1, pagecast.Message("user", "a")], TypeError, f"input: expected {ACCEPTED}; item 1 is Message"),
        ([pagecast.Message("user", "a"), 1], TypeError, rf"input: expected {ACCEPTED}; input\[1\] is int"),
        ([1, -1], ValueError, r"input\[1\]: -1 is not from 0 to 2\*\*32-1"),
        ([2**32], ValueError, r"input\[0\]: 4294967296 is not from 0"),
        (SURROGATE, ValueError, r"input\[0\].content: character 1 is a lone surrogate"),
        ([pagecast.Message("tool", "a")], ValueError, r"input\[0\].role: 'tool' is none of system, user"),  # type: ignore[arg-type]
        ([pagecast.Message(["user"], "a")], TypeError, r"input\[0\].role: expected a str"),  # type: ignore[arg-type]
        ([pagecast.Message("user", 5)], TypeError, r"input\[0\].content: expected a str, got int"),  # type: ignore[arg-type]
    ],
)
def test_items_of_the_wrong_kind(content: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        _requests.generate("ses_0", content)


def test_a_raw_text_of_no_characters_that_utf8_has() -> None:
    with pytest.raises(ValueError, match=r"^input: character 1 is a lone surrogate"):
        _requests.generate("ses_0", SURROGATE, raw=True)


@pytest.mark.parametrize("ids", [range(1, 4), (1, 2, 3), array.array("I", [1, 2, 3]), [1, Index(2), 3]])
def test_any_sequence_of_whole_numbers_is_ids(ids: Any) -> None:
    assert _requests.generate("ses_0", ids).input.token_ids.ids == [1, 2, 3]


@pytest.mark.parametrize(
    "build", [partial(_requests.append_input, "ses_0"), partial(_requests.tokenize, "tiny")]
)
def test_none_is_no_input_where_nothing_can_be_continued(build: Callable[..., Any]) -> None:
    message = r"^input: expected a str, a sequence of int, a sequence of Message, got NoneType$"
    with pytest.raises(TypeError, match=message):
        build(None)
    assert build("a", raw=True).input.text == "a"


def test_an_initial_input_is_named_as_such() -> None:
    with pytest.raises(ValueError, match=r"^initial_input\[0\]: -1 is not"):
        _requests.open_session("tiny", initial_input=[-1])
    with pytest.raises(TypeError, match=r"^raw: only a str can be raw, not list$"):
        _requests.open_session("tiny", initial_input=[1], raw=True)
    assert _requests.open_session("tiny", initial_input="a", raw=True).initial_input.text == "a"
