"""Frozen values that the client takes and gives. Knows no channel and no call."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from pagecast.v1 import generation_pb2, session_pb2


class PagedDecodePlan(Enum):
    """How a session's decode step gets its plan; the values of `pagecast.v1.PagedDecodePlan`.

    Tokens do not depend on it, bit for bit.
    """

    PLAN_ONCE = session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE
    REPLAN = session_pb2.PAGED_DECODE_PLAN_REPLAN


class FinishReason(Enum):
    """Why a generation ended; the values of `pagecast.v1.FinishReason`."""

    UNSPECIFIED = generation_pb2.FINISH_REASON_UNSPECIFIED  # also one that this client does not know
    EOS = generation_pb2.FINISH_REASON_EOS
    STOP_SEQUENCE = generation_pb2.FINISH_REASON_STOP_SEQUENCE
    STOP_TOKEN = generation_pb2.FINISH_REASON_STOP_TOKEN
    MAX_TOKENS = generation_pb2.FINISH_REASON_MAX_TOKENS
    CONTEXT_FULL = generation_pb2.FINISH_REASON_CONTEXT_FULL
    TIME_LIMIT = generation_pb2.FINISH_REASON_TIME_LIMIT
    CANCELLED = generation_pb2.FINISH_REASON_CANCELLED

    @classmethod
    def _missing_(cls, value: object) -> "FinishReason":  # noqa: ARG003  the enum's hook
        return cls.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Message:
    """One new message of a turn; the session remembers the earlier ones."""

    role: Literal["system", "user", "assistant"]
    content: str


Content = str | Sequence[int] | Sequence[Message]
"""One user message (or plain text, where a call says so), token ids, messages."""

TurnInput = Content | None
"""What a turn takes in; None continues the log."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that arrived together.

    Attributes:
        text: Text that became certain with them. May be empty: a character can need several tokens.
        token_ids: Their ids.
        first_token_index: Index of `token_ids[0]` among the generation's tokens.
        timings: One per token by the worker's clock, empty unless `token_timing` was asked for.
        logprobs: One per token, of the raw logits, empty unless `logprobs` was asked for.
        top_logprobs: For each token the likeliest ones as (id, logprob), likeliest first; as `logprobs`.
    """

    text: str
    token_ids: tuple[int, ...]
    first_token_index: int
    timings: tuple[generation_pb2.TokenTiming, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A finished turn.

    Attributes:
        generation_id: The generation's id.
        text: All text deltas, concatenated.
        token_ids: All generated ids, also EOS and those that end a stop sequence.
        input_token_ids: The ids that the input became.
        finish_reason: Why it ended.
        stopped_by: The stop sequence or stop token id that ended it; None: something else did.
        sampling: Every effective sampling value, the drawn seed included.
        usage: Tokens taken in, found cached, computed again, put out.
        timing: By the worker's monotonic clock, in ns.
        plan_stats: This generation's steps by how each got its plan.
        revision: The session's revision after the turn.
        ttft_ms: From the call to the first token's arrival at the reader; None without tokens.
        itl_ms: Between the arrivals of neighbouring tokens at the reader, one value fewer than
            tokens. Tokens of one chunk arrived together: 0 between them.
        logprobs: One per token, of the raw logits, empty unless `logprobs` was asked for.
        top_logprobs: For each token the likeliest ones as (id, logprob), likeliest first; as `logprobs`.
    """

    generation_id: str
    text: str
    token_ids: tuple[int, ...]
    input_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stopped_by: str | int | None
    sampling: session_pb2.SamplingParams
    usage: generation_pb2.Usage
    timing: generation_pb2.GenerationTiming
    plan_stats: session_pb2.PlanStats
    revision: int
    ttft_ms: float | None
    itl_ms: tuple[float, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
