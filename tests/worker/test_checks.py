"""Ranges of what requests say: a worker takes nobody's word."""

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2, session_pb2
from service.validate import limits
from worker import checks
from worker.checks import duration_ns, sampling_choice, stopping_from_wire
from worker.errors import Refused
from worker.params import SamplingChoice, Stopping

VOCABULARY = 272
EOS = frozenset({2})
NAN, INFINITY = float("nan"), float("inf")


def sampling(**fields: Any) -> SamplingChoice:
    return sampling_choice(session_pb2.SamplingParams(**fields), "sampling", vocab_size=VOCABULARY)


def stopping(**fields: Any) -> Stopping:
    criteria = generation_pb2.StoppingCriteria(**fields)
    return stopping_from_wire(criteria, eos_ids=EOS, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.01, 100.1, NAN, INFINITY)),
        ("top_k", 0),
        *(("top_p", value) for value in (0.0, -0.5, 1.001, NAN)),
        *(("min_p", value) for value in (-0.001, 1.001, NAN)),
        *(("repetition_penalty", value) for value in (0.0, -1.0, 100.5, NAN, INFINITY)),
        *(("presence_penalty", value) for value in (-2.1, 2.1, NAN)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN, -INFINITY)),
        ("logprobs", 21),
        *(("logit_bias", {5: value}) for value in (-100.1, 100.1, NAN, INFINITY)),
        ("logit_bias", {VOCABULARY: 0.0}),
        ("logit_bias", {2**32 - 1: 0.0}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    ],
)
def test_s23_sampling_out_of_range_is_refused_by_its_field(name: str, value: Any) -> None:
    with pytest.raises(Refused, match="FIELD_OUT_OF_RANGE") as caught:
        sampling(**{name: value})
    assert caught.value.field == f"sampling.{name}"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 300}, "stop_sequences"),
        ({"stop_sequences": ["x", ""]}, "stop_sequences[1]"),
        ({"stop_sequences": ["é" * 129]}, "stop_sequences[0]"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"stop_token_ids": [1, VOCABULARY]}, "stop_token_ids"),
    ],
)
def test_s24_stopping_out_of_range_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused, match="FIELD_OUT_OF_RANGE") as caught:
        stopping(**fields)
    assert caught.value.field == f"stopping.{field}"


def test_the_ends_of_all_ranges_are_taken() -> None:
    for name, bounds in checks.SAMPLING_RANGES.items():
        low = 1e-45 if bounds.is_open else bounds.low
        for value in (low, bounds.high):
            kind = int if name in {"top_k", "logprobs"} else float
            chosen = getattr(sampling(**{name: kind(value)}), name)
            assert chosen == pytest.approx(value, rel=1e-3, abs=1e-44)
            assert chosen > 0 or not bounds.is_open
    biased = sampling(logit_bias={VOCABULARY - 1: -100.0, 0: 100.0})
    assert biased == SamplingChoice(logit_bias={VOCABULARY - 1: -100.0, 0: 100.0})
    assert sampling(logit_bias=dict.fromkeys(range(VOCABULARY), 1.0)).logit_bias is not None
    assert stopping(
        max_tokens=1,
        min_tokens=1,
        stop_sequences=["é" * 128] * 16,
        stop_token_ids=[VOCABULARY - 1] * 64,
        ignore_eos=True,
    ) == Stopping(1, 1, ("é" * 128,) * 16, frozenset({VOCABULARY - 1}), frozenset())


def test_nothing_said_is_nothing_chosen() -> None:
    assert sampling() == SamplingChoice()
    assert stopping() == Stopping(eos_ids=EOS)


@pytest.mark.parametrize(
    "value",
    [
        Duration(),
        Duration(seconds=-1),
        Duration(nanos=-1),
        Duration(seconds=1, nanos=-1),
        Duration(nanos=10**9),
        Duration(seconds=2**62),
    ],
)
def test_a_duration_is_over_nothing_and_normalised(value: Duration) -> None:
    with pytest.raises(Refused, match="FIELD_OUT_OF_RANGE") as caught:
        duration_ns(value, "time_limit")
    assert caught.value.field == "time_limit"


def test_durations_are_exact() -> None:
    assert (
        duration_ns(Duration(seconds=315_576_000_000, nanos=999_999_999), "x") == 315_576_000_000_999_999_999
    )
    assert duration_ns(Duration(nanos=1), "x") == 1


def test_gateway_and_worker_have_the_same_ranges() -> None:
    """They share no module: what one takes the other must not refuse."""
    assert checks.SAMPLING_RANGES.keys() == limits.SAMPLING.keys()
    for name, bounds in checks.SAMPLING_RANGES.items():
        other = limits.SAMPLING[name]
        assert (bounds.low, bounds.is_open) == (other.low, other.is_open)
        assert bounds.high == (2**32 - 1 if other.high is None else other.high)
    assert (checks.LOGIT_BIAS_RANGE.low, checks.LOGIT_BIAS_RANGE.high) == (
        limits.LOGIT_BIAS.low,
        limits.LOGIT_BIAS.high,
    )
    for name in ("MAX_LOGIT_BIASES", "MAX_STOP_SEQUENCES", "MAX_STOP_SEQUENCE_BYTES", "MAX_STOP_TOKEN_IDS"):
        assert getattr(checks, name) == getattr(limits, name)
