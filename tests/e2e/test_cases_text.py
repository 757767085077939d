"""Cases about stops and limits, over gRPC and on the command line."""

import subprocess
import sys

import grpc
import pytest

from tests.e2e.calls import Api, Refusal, Reply, refusal_of

pytestmark = pytest.mark.e2e
# Only lower-case letters are drawn, one a token: stop sequences span tokens.
LETTERS = {3 + byte: 100.0 for byte in range(ord("a"), ord("z") + 1)}
SAMPLING = {"temperature": 4.0, "seed": 12, "logit_bias": LETTERS}
NUM_TOKENS = 60


def letters(api: Api, *stops: str, min_tokens: int = 0) -> Reply:
    with api.session() as session_id:
        return api.turn(
            session_id,
            "spell",
            max_tokens=NUM_TOKENS,
            sampling=SAMPLING,
            stop={"stop_sequences": stops, "min_tokens": min_tokens},
        )


@pytest.mark.parametrize("at", [0, 1, 17, 40])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_s27_no_part_of_a_stop_sequence_is_told(api: Api, at: int, length: int) -> None:
    whole = letters(api)
    assert (len(whole.text), whole.text.islower()) == (NUM_TOKENS, True)
    stop = whole.text[at : at + length]
    at = whole.text.index(stop)
    # A longer one that begins the same way, and one that never comes.
    cut = letters(api, stop + "A", stop, "A")
    assert (cut.end, cut.finished.stop_sequence) == ("STOP_SEQUENCE", stop)
    assert cut.text == whole.text[:at]
    assert cut.ids == whole.ids[: at + length]


def test_s27_text_that_might_have_become_a_stop_comes_after_all(api: Api) -> None:
    whole = letters(api)
    stops = [whole.text[number : number + 5] + "A" for number in range(0, 50, 7)]
    held = letters(api, *stops, whole.text[-4:] + "A")
    assert (held.end, held.text, held.ids) == ("MAX_TOKENS", whole.text, whole.ids)
    # The first letters of a stop wait for what follows them: fewer deltas than tokens have text.
    assert sum(bool(chunk.text_delta) for chunk in held.chunks) < NUM_TOKENS


def test_s27_stops_are_not_looked_for_before_min_tokens(api: Api) -> None:
    whole = letters(api)
    stop = whole.text[30:34]
    first, later = whole.text.index(stop), whole.text.find(stop, 34)
    cut = letters(api, stop, min_tokens=first + 5)
    assert cut.ids[: first + 5] == whole.ids[: first + 5]
    assert len(cut.text) == (NUM_TOKENS if later < 0 else later)


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens"])
def test_s24_limits_of_no_token_are_refused_by_field(api: Api, field: str) -> None:
    with api.session() as session_id:
        stop = {"min_tokens": 3} if field == "min_tokens" else {}
        call = lambda: api.turn(session_id, "a", max_tokens=2 if stop else 0, stop=stop)  # noqa: E731
        assert refusal_of(call) == Refusal(
            grpc.StatusCode.INVALID_ARGUMENT, "FIELD_OUT_OF_RANGE", f"stopping.{field}"
        )
        assert api.get(session_id).num_tokens == 0
        assert len(api.turn(session_id, "a", max_tokens=1).ids) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("serve", "--kv-blocks", "0"),
        ("serve", "--max-step-tokens", "0"),
        ("serve", "--workers", "-1"),
        ("serve", "--threads", "0"),
        ("generate", "--max-tokens", "0"),
        ("generate", "--max-tokens", "-1"),
    ],
)
def test_s24_flags_of_no_token_are_refused_by_name(flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "service.cli", *flags]
    done = subprocess.run(
        [*command, *(["hello"] if flags[0] == "generate" else [])], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert flags[1] in done.stderr.decode()
