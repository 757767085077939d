"""The ranges of the public API, all of them. A leaf: knows no message."""

from collections.abc import Mapping
from dataclasses import dataclass

MAX_LABELS = 64
MAX_LABEL_BYTES = 256
MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100
MAX_STOP_SEQUENCES = 16
MAX_STOP_SEQUENCE_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
# A week: what waits or runs longer was meant in another unit.
MAX_DURATION_S = 7 * 24 * 3600
# Of a repeated field of messages.
MAX_ITEMS = 4096


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`; NaN is in none.

    Attributes:
        low: The least number.
        high: The greatest one, inclusive; None: what the field's type holds.
        is_open: Whether `low` itself is outside.
    """

    low: float
    high: float | None = None
    is_open: bool = False

    def __contains__(self, value: float) -> bool:
        # NaN compares false with everything, so the accepted range is what is tested.
        is_over_low = value > self.low if self.is_open else value >= self.low
        return is_over_low and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        low = f"over {self.low:g}" if self.is_open else f"at least {self.low:g}"
        return low if self.high is None else f"{low} and at most {self.high:g}"


# Fields of `SamplingParams`; the values of `logit_bias`.
SAMPLING: Mapping[str, Range] = {
    "temperature": Range(0, 100),
    "top_k": Range(1),
    "top_p": Range(0, 1, is_open=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, is_open=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "logprobs": Range(0, 20),
}
LOGIT_BIAS = Range(-100, 100)
AT_LEAST_ONE = Range(1)
PAGE_SIZE = Range(1, MAX_PAGE_SIZE)
