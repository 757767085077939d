"""The options of the calls, by name. Knows no request and no channel."""

from collections.abc import Mapping
from typing import TypedDict

from pagecast.values import PagedDecodePlan


class SessionOptions(TypedDict, total=False):
    """What `open_session` takes beside the model; an absent one, or None, leaves the server's default.

    Attributes:
        plan: How the decode step gets its plan.
        max_context_tokens: The log's budget, at least 1; a longer one ends CONTEXT_FULL.
        temperature: Default of the session's turns: 0 is greedy, at most 100.
        seed: Default of the session's turns: 0 to 2**64-1.
        labels: Names and values to find the session by.
    """

    plan: PagedDecodePlan | None
    max_context_tokens: int | None
    temperature: float | None
    seed: int | None
    labels: Mapping[str, str] | None


class GenerateOptions(TypedDict, total=False):
    """What `generate` takes beside its input; an absent one, or None, takes the session's default.

    Attributes:
        raw: Append a str as it is. Otherwise it is one user message through the chat template.
        max_tokens: At least 1; absent: up to the session's context.
        temperature: 0 is greedy, at most 100.
        seed: 0 to 2**64-1. Same log and seed: same tokens.
        expected_revision: Refuse with `RevisionMismatch` where the session has another one.
        keep_partial: A cancel, disconnect or deadline commits the input and the tokens so far.
            Otherwise the turn never happened.
        token_timing: Fill `Chunk.timings`.
    """

    raw: bool
    max_tokens: int | None
    temperature: float | None
    seed: int | None
    expected_revision: int | None
    keep_partial: bool
    token_timing: bool
