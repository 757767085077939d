"""What requests say about sampling, stopping and times, checked whole and made into values.

The gateway checks the same ranges; a worker takes nobody's word, and knows the vocabulary besides. Knows
no sessions. A refusal names the field by its path in the request.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2, session_pb2
from worker.errors import Refused
from worker.params import SamplingChoice, Stopping


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`; without `low` itself where `is_open`."""

    low: float
    high: float
    is_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` is in the range; NaN is in none."""
        return (self.low < value if self.is_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'over ' if self.is_open else ''}{self.low:g} to {self.high:g}"


SAMPLING_RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 100),
    "top_k": Range(1, 2**32 - 1),
    "top_p": Range(0, 1, is_open=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, is_open=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "logprobs": Range(0, 20),
}
LOGIT_BIAS_RANGE = Range(-100, 100)
MAX_LOGIT_BIASES = 1024
MAX_STOP_SEQUENCES = 16
MAX_STOP_SEQUENCE_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
# What a protobuf Duration may hold.
_MAX_SECONDS = 315_576_000_000
_NS_PER_S = 1_000_000_000


def sampling_choice(params: session_pb2.SamplingParams, path: str, *, vocab_size: int) -> SamplingChoice:
    """What a request says about sampling.

    Args:
        params: Of the request.
        path: Of `params` in the request.
        vocab_size: Ids that may be biased are below it.

    Refused: FIELD_OUT_OF_RANGE.
    """
    said: dict[str, Any] = {}
    for name, bounds in SAMPLING_RANGES.items():
        if params.HasField(name):
            said[name] = getattr(params, name)
            _check_range(said[name], bounds, f"{path}.{name}")
    if params.HasField("seed"):
        said["seed"] = params.seed
    if params.logit_bias:
        field = f"{path}.logit_bias"
        check_count(len(params.logit_bias), MAX_LOGIT_BIASES, field)
        said["logit_bias"] = dict(params.logit_bias)
        check_token_ids(params.logit_bias, field, vocab_size=vocab_size)
        for value in params.logit_bias.values():
            _check_range(value, LOGIT_BIAS_RANGE, field)
    return SamplingChoice(**said)


def stopping_from_wire(
    criteria: generation_pb2.StoppingCriteria, *, eos_ids: frozenset[int], vocab_size: int
) -> Stopping:
    """When a turn ends.

    Args:
        criteria: Of the request.
        eos_ids: The model's.
        vocab_size: Stop tokens are below it.

    Refused: FIELD_OUT_OF_RANGE.
    """
    max_tokens = criteria.max_tokens if criteria.HasField("max_tokens") else None
    if max_tokens == 0:
        raise out_of_range("stopping.max_tokens", "must be at least 1", min="1")
    if max_tokens is not None and criteria.min_tokens > max_tokens:
        raise out_of_range("stopping.min_tokens", "is over max_tokens", max=str(max_tokens))
    check_count(len(criteria.stop_sequences), MAX_STOP_SEQUENCES, "stopping.stop_sequences")
    for index, sequence in enumerate(criteria.stop_sequences):
        num_bytes = len(sequence.encode())
        if not 1 <= num_bytes <= MAX_STOP_SEQUENCE_BYTES:
            raise out_of_range(
                f"stopping.stop_sequences[{index}]",
                f"has {num_bytes} bytes, 1 to {MAX_STOP_SEQUENCE_BYTES} are taken",
                bytes=str(num_bytes),
                max=str(MAX_STOP_SEQUENCE_BYTES),
            )
    check_count(len(criteria.stop_token_ids), MAX_STOP_TOKEN_IDS, "stopping.stop_token_ids")
    check_token_ids(criteria.stop_token_ids, "stopping.stop_token_ids", vocab_size=vocab_size)
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=criteria.min_tokens,
        stop_sequences=tuple(criteria.stop_sequences),
        stop_token_ids=frozenset(criteria.stop_token_ids),
        eos_ids=frozenset() if criteria.ignore_eos else eos_ids,
    )


def duration_ns(value: Duration, field: str) -> int:
    """A duration over 0, in nanoseconds. Refused: FIELD_OUT_OF_RANGE."""
    if not (0 <= value.seconds <= _MAX_SECONDS and 0 <= value.nanos < _NS_PER_S):
        raise out_of_range(field, "is negative or no normalised duration")
    total_ns = value.seconds * _NS_PER_S + value.nanos
    if total_ns == 0:
        raise out_of_range(field, "must be over 0")
    return total_ns


def check_token_ids(ids: Iterable[int], field: str, *, vocab_size: int) -> None:
    """Refuse ids that are no tokens of the vocabulary: FIELD_OUT_OF_RANGE.

    Args:
        ids: Iterable of ids at or over 0, may be empty.
        field: Named by the refusal.
        vocab_size: All must be below it.
    """
    worst = max(ids, default=-1)
    if worst >= vocab_size:
        raise out_of_range(
            field,
            f"holds token id {worst}, which is not below the vocabulary's size of {vocab_size}",
            token_id=str(worst),
            vocab_size=str(vocab_size),
        )


def check_count(count: int, limit: int, field: str) -> None:
    """Refuse more than `limit` of something: FIELD_OUT_OF_RANGE."""
    if count > limit:
        raise out_of_range(
            field, f"holds {count}, at most {limit} are taken", count=str(count), max=str(limit)
        )


def out_of_range(field: str, what: str, **metadata: str) -> Refused:
    """FIELD_OUT_OF_RANGE of one field."""
    return Refused("FIELD_OUT_OF_RANGE", f"{field} {what}", field=field, metadata=metadata)


def _check_range(value: float, bounds: Range, field: str) -> None:
    if not bounds.holds(value):
        raise out_of_range(
            field,
            f"must be a number {bounds}",
            value=f"{value:g}",
            min=f"{bounds.low:g}",
            max=f"{bounds.high:g}",
        )
