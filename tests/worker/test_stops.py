from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.stops import StopMatcher


def _first_stop(text: str, may_stop: list[bool], sequences: tuple[str, ...]) -> tuple[int, str] | None:
    """The naive twin: the start of the first stop, and the stop, by trying every end and every sequence."""
    for end in range(1, len(text) + 1):
        met = [each for each in sequences if text[:end].endswith(each)]
        if met and may_stop[end - 1]:
            longest = max(met, key=len)
            return end - len(longest), longest
    return None


def _possible_start(text: str, sequences: tuple[str, ...]) -> int:
    """Where the longest end of `text` starts that is a proper beginning of a sequence."""
    return min(
        start
        for start in range(len(text) + 1)
        if any(len(text) - start < len(each) and each.startswith(text[start:]) for each in sequences)
    )


def _run(pieces: list[str], sequences: tuple[str, ...]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(sequences)
    released = []
    for piece in pieces:
        text, met = matcher.push(piece)
        released.append(text)
        if met is not None:
            return released, met
    return [*released, matcher.finish()], None


_letters = st.text("abé🙂", max_size=6)
_sequences = st.lists(st.text("abé🙂", min_size=1, max_size=5), min_size=1, max_size=5).map(tuple)


@given(st.lists(st.tuples(_letters, st.booleans()), max_size=12), _sequences)
@example([("ab", False), ("a", True)], ("ab", "ba"))
@example([("aa", False), ("a", True)], ("aa",))
@example([("abab", False), ("é", True)], ("abab", "abé"))
def test_equals_the_naive_search(pushes: list[tuple[str, bool]], sequences: tuple[str, ...]) -> None:
    text = "".join(piece for piece, _ in pushes)
    may_stop = [flag for piece, flag in pushes for _ in piece]
    stop = _first_stop(text, may_stop, sequences)
    matcher = StopMatcher(sequences)
    seen = released = ""
    for piece, flag in pushes:
        seen += piece
        certain, met = matcher.push(piece, may_stop=flag)
        released += certain
        if stop is not None and stop[0] + len(stop[1]) <= len(seen):
            assert (released, met) == (text[: stop[0]], stop[1])
            assert matcher.finish() == ""
            return
        # Not a character that may belong to a stop, and not one less than is certain.
        assert met is None
        assert released == seen[: _possible_start(seen, sequences)]
    assert stop is None
    assert released + matcher.finish() == text


@given(st.lists(_letters, max_size=12), _sequences, st.randoms(use_true_random=False))
def test_s27_the_cutting_into_pushes_changes_nothing(
    pieces: list[str], sequences: tuple[str, ...], random: object
) -> None:
    text = "".join(pieces)
    by_pieces, met = _run(pieces, sequences)
    by_characters, met_again = _run(list(text), sequences)
    at_once, met_at_once = _run([text], sequences)
    assert "".join(by_pieces) == "".join(by_characters) == "".join(at_once)
    assert met == met_again == met_at_once


def test_s27_the_first_half_of_a_stop_is_held_back() -> None:
    matcher = StopMatcher(("\n\nUser:",))
    assert matcher.push("Hi.\n") == ("Hi.", None)
    assert matcher.push("\nUs") == ("", None)
    assert matcher.push("er: what") == ("", "\n\nUser:")


def test_s27_held_back_text_comes_once_it_cannot_become_a_stop() -> None:
    matcher = StopMatcher(("\n\nUser:",))
    assert [matcher.push(text)[0] for text in ("Hi.\n", "\n", "Use", "ful")] == ["Hi.", "", "", "\n\nUseful"]
    assert matcher.push("\n") == ("", None)
    assert matcher.finish() == "\n"


def test_the_first_to_end_is_met_and_of_those_the_longest() -> None:
    assert StopMatcher(("abcd", "bc")).push("xabcd") == ("xa", "bc")
    assert StopMatcher(("bc", "abc", "c")).push("xabcd") == ("x", "abc")
    assert _run(["a", "b", "c", "d"], ("abcd", "bc")) == (["", "", "a"], "bc")


def test_a_stop_before_min_tokens_does_not_count() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("an END", may_stop=False) == ("an END", None)
    assert matcher.push(" and EN", may_stop=False) == (" and ", None)
    assert matcher.push("D.") == ("", "END")


def test_without_sequences_text_comes_at_once() -> None:
    matcher = StopMatcher(())
    assert matcher.push("a 🙂") == ("a 🙂", None)
    assert matcher.push("") == ("", None)
    assert matcher.finish() == ""


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="stop sequence 1 is empty"):
        StopMatcher(("a", ""))


def test_nothing_may_follow_a_stop() -> None:
    matcher = StopMatcher(("a",))
    assert matcher.push("ba") == ("b", "a")
    with pytest.raises(RuntimeError, match="after the stop"):
        matcher.push("c")


class _Counting(list[int]):
    """A list that counts how often it is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def test_the_work_is_linear_in_the_text() -> None:
    """Text that all but completes each of 16 sequences of 256: a fallback per character at most."""
    matcher = StopMatcher(tuple("a" * length + "b" for length in range(240, 256)))
    fallbacks = matcher._fallback = _Counting(matcher._fallback)
    num_characters = 0
    for size in (3, 255, 700, 1) * 100:
        for text in ("a" * size, "c"):
            matcher.push(text)
            num_characters += len(text)
    assert 0 < fallbacks.reads <= num_characters
