"""The engine thread over a real tiny model: every way in which a turn ends by itself."""

from dataclasses import replace

import pytest

from tests.worker.engine_harness import BLOCK, Harness, failed, finished, text_of, token_ids
from worker.batch import Event, FinishReason, TokenDrawn
from worker.errors import Refused
from worker.params import Sampling, Stopping

PROMPT = tuple(range(10, 30))
COUNT = 12
GREEDY = Sampling()


@pytest.fixture
def reply(harness: Harness) -> list[Event]:
    """What the model says if nothing stops it."""
    harness.open("plain")
    return harness.run("plain", PROMPT, sampling=GREEDY, max_tokens=COUNT)


def run(harness: Harness, stopping: Stopping, *, sampling: Sampling = GREEDY) -> list[Event]:
    harness.open("a")
    return harness.run("a", PROMPT, sampling=sampling, stopping=stopping)


def first_seen(ids: list[int], index: int) -> int:
    """The first index at or behind `index` whose token has not come before it."""
    return next(place for place in range(index, len(ids)) if ids[place] not in ids[:place])


def test_the_replies_that_the_cases_cut_are_long_enough(reply: list[Event]) -> None:
    assert len(token_ids(reply)) == COUNT
    assert len(text_of(reply)) >= 8
    assert finished(reply).reason is FinishReason.MAX_TOKENS
    assert finished(reply).stopped_by is None


def test_a_stop_token_is_emitted_and_ends_the_turn(harness: Harness, reply: list[Event]) -> None:
    ids = token_ids(reply)
    place = first_seen(ids, 3)
    events = run(harness, Stopping(max_tokens=COUNT, stop_token_ids=frozenset({ids[place], 299})))
    assert token_ids(events) == ids[: place + 1]
    assert (finished(events).reason, finished(events).stopped_by) == (FinishReason.STOP_TOKEN, ids[place])
    assert harness.session("a").token_ids == [*PROMPT, *ids[: place + 1]]
    # Its text is text like any other's.
    whole = b"".join(map(harness.tokenizer.token_bytes, ids[: place + 1])).decode(errors="replace")
    assert text_of(events) == whole


@pytest.mark.parametrize("length", [1, 2, 5])
def test_s27_no_character_of_a_stop_sequence_is_told(
    harness: Harness, reply: list[Event], length: int
) -> None:
    text = text_of(reply)
    start = next(place for place in range(2, len(text)) if text.find(text[place : place + length]) == place)
    sequence = text[start : start + length]
    events = run(harness, Stopping(max_tokens=COUNT, stop_sequences=(sequence, "never said")))
    assert text_of(events) == text[:start]
    assert (finished(events).reason, finished(events).stopped_by) == (FinishReason.STOP_SEQUENCE, sequence)
    # The ids that complete it are emitted and stay in the log.
    ids = token_ids(events)
    assert ids == token_ids(reply)[: len(ids)]
    assert harness.session("a").token_ids == [*PROMPT, *ids]
    said = b"".join(map(harness.tokenizer.token_bytes, ids)).decode(errors="replace")
    assert sequence in said


def test_what_is_held_back_for_a_stop_sequence_is_told_at_the_end(
    harness: Harness, reply: list[Event]
) -> None:
    text = text_of(reply)
    events = run(harness, Stopping(max_tokens=COUNT, stop_sequences=(text[2:] + "…",)))
    assert text_of(events) == text
    told = [event.text for event in events if isinstance(event, TokenDrawn)]
    assert "".join(told) == text[:2]
    assert finished(events).text == text[2:]


def test_precedence_of_ends(harness: Harness, reply: list[Event]) -> None:
    """Of what the same token brings about, EOS is told, then stop token, sequence, max_tokens."""
    ids = token_ids(reply)
    place = first_seen(ids, 3)
    last = frozenset({ids[place]})
    said = harness.tokenizer.token_bytes(ids[place]).decode(errors="replace")
    everything = Stopping(
        max_tokens=place + 1, stop_sequences=(said,), stop_token_ids=last, eos_ids=last, min_tokens=place
    )
    steps = [
        (everything, FinishReason.EOS),
        (replace(everything, eos_ids=frozenset()), FinishReason.STOP_TOKEN),
        (replace(everything, eos_ids=frozenset(), stop_token_ids=frozenset()), FinishReason.STOP_SEQUENCE),
        (Stopping(max_tokens=place + 1), FinishReason.MAX_TOKENS),
    ]
    whole = b"".join(map(harness.tokenizer.token_bytes, ids[: place + 1])).decode(errors="replace")
    for number, (stopping, reason) in enumerate(steps):
        harness.open(f"s{number}")
        events = harness.run(f"s{number}", PROMPT, sampling=GREEDY, stopping=stopping)
        assert finished(events).reason is reason
        assert len(token_ids(events)) == place + 1
        # Only a sequence cuts the text, also where another reason came before it.
        assert (text_of(events) == whole) is (reason is not FinishReason.STOP_SEQUENCE)


def test_before_min_tokens_nothing_that_ends_the_turn_is_drawn(harness: Harness, reply: list[Event]) -> None:
    ids = token_ids(reply)
    first, second = frozenset({ids[0]}), frozenset(ids)
    events = run(harness, Stopping(max_tokens=20, min_tokens=6, eos_ids=first, stop_token_ids=second))
    told = token_ids(events)
    assert len(told) > 6
    assert not set(told[:6]) & (first | second)
    harness.open("b")
    freed = harness.run(
        "b", PROMPT, sampling=GREEDY, stopping=Stopping(max_tokens=20, eos_ids=first, stop_token_ids=second)
    )
    assert token_ids(freed) == ids[:1]


def test_before_min_tokens_stop_sequences_are_not_looked_for(harness: Harness, reply: list[Event]) -> None:
    said = text_of(reply)[:1]
    events = run(harness, Stopping(max_tokens=COUNT, min_tokens=COUNT, stop_sequences=(said,)))
    assert len(token_ids(events)) == COUNT
    harness.open("b")
    early = harness.run(
        "b", PROMPT, sampling=GREEDY, stopping=Stopping(max_tokens=COUNT, stop_sequences=(said,))
    )
    assert finished(early).reason is FinishReason.STOP_SEQUENCE
    assert text_of(early) == ""


def test_an_ignored_eos_is_a_token_like_any(harness: Harness) -> None:
    (eos,) = harness.tokenizer.eos_ids
    forced = replace(GREEDY, logit_bias={eos: 100.0})
    ends = run(harness, Stopping(max_tokens=4, eos_ids=frozenset({eos})), sampling=forced)
    assert (token_ids(ends), finished(ends).reason) == ([eos], FinishReason.EOS)
    harness.open("b")
    goes_on = harness.run("b", PROMPT, sampling=forced, stopping=Stopping(max_tokens=4))
    assert (token_ids(goes_on), finished(goes_on).reason) == ([eos] * 4, FinishReason.MAX_TOKENS)
    assert text_of(goes_on) == ""


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_s12_lengths_around_a_block_give_what_one_step_each_gives(harness: Harness, length: int) -> None:
    log = tuple((11 * place) % 250 for place in range(length))
    harness.open("whole")
    whole = token_ids(harness.run("whole", log, max_tokens=3))
    harness.open("pieces")
    harness.run("pieces", log[:1], appends_only=True)
    for token in log[1:-1]:
        harness.run("pieces", (token,), appends_only=True)
    assert token_ids(harness.run("pieces", log[-1:], max_tokens=3)) == whole


def test_s26_a_prompt_over_the_context_is_refused_and_growth_ends_with_the_context(harness: Harness) -> None:
    harness.open("a")
    with pytest.raises(Refused, match="PROMPT_TOO_LONG") as caught:
        harness.submit("a", (3,) * 512)
    assert caught.value.metadata == {"num_tokens": "512", "max_context_tokens": "512"}
    assert harness.view("a").num_tokens == 0
    events = harness.run("a", (3,) * 508, max_tokens=None)
    assert (finished(events).reason, len(token_ids(events))) == (FinishReason.CONTEXT_FULL, 4)
    assert harness.view("a").num_tokens == 512
    with pytest.raises(Refused, match="PROMPT_TOO_LONG"):
        harness.submit("a", ())


def test_logprobs_come_with_each_token_when_asked_for(harness: Harness, reply: list[Event]) -> None:
    events = run(harness, Stopping(max_tokens=4), sampling=replace(GREEDY, logprobs=3))
    drawn = [event.drawn for event in events if isinstance(event, TokenDrawn)]
    assert [each.token_id for each in drawn] == token_ids(reply)[:4]
    for each in drawn:
        assert each.top[0].token_id == each.token_id
        assert (len(each.top), each.top[0].logprob) == (3, each.logprob)
    assert all(event.drawn.logprob is None for event in reply if isinstance(event, TokenDrawn))


def test_a_turn_that_fails_is_no_end(harness: Harness) -> None:
    harness.open("a")
    assert failed(harness.run("a", (1,), deadline_ns=0)).reason == "DEADLINE_EXCEEDED"
