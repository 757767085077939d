"""The options of the calls, by name. Knows no request and no channel."""

from collections.abc import Mapping, Sequence
from typing import TypedDict
from uuid import UUID

from pagecast.values import Content, PagedDecodePlan


class SamplingOptions(TypedDict, total=False):
    """How tokens are drawn: penalties, bias, temperature, top_k, top_p, min_p, in this order.

    Attributes:
        temperature: 0 is greedy, at most 100.
        top_k: Draw from the so many most likely tokens; at least 1.
        top_p: Draw from the most likely tokens that reach this probability together; over 0, at most 1.
        min_p: Draw from tokens at least so likely, times the likeliest one's probability; 0 to 1.
        seed: 0 to 2**64-1. Same log and seed: same tokens.
        repetition_penalty: Over 0, at most 100; 1 is neutral. Covers the whole log.
        presence_penalty: -2 to 2; 0 is neutral. Covers the generation.
        frequency_penalty: -2 to 2; 0 is neutral. Covers the generation.
        logit_bias: Token ids and what is added to their logits, -100 to 100.
        logprobs: Each drawn token's logprob and those of the so many likeliest ones, 0 to 20.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None


class SessionOptions(SamplingOptions, total=False):
    """What `open_session` takes beside the model; an absent one, or None, leaves the server's default.

    `SamplingOptions` set here are those of turns that set none of their own.

    Attributes:
        plan: How the decode step gets its plan.
        max_context_tokens: The log's budget, at least 1; a longer one ends CONTEXT_FULL.
        priority: Of turns that have none of their own; higher runs first.
        labels: Names and values to find the session by.
        initial_input: What the log begins with.
        raw: Take a str of `initial_input` as it is. Otherwise it is a user message.
        request_id: A UUID; the same call once more with it opens no second session.
    """

    plan: PagedDecodePlan | None
    max_context_tokens: int | None
    priority: int | None
    labels: Mapping[str, str] | None
    initial_input: Content | None
    raw: bool
    request_id: str | UUID | None


class GenerateOptions(SamplingOptions, total=False):
    """What `generate` takes beside its input; an absent one, or None, takes the session's default.

    Attributes:
        raw: Append a str as it is. Otherwise it is one user message through the chat template.
        max_tokens: At least 1; absent: up to the session's context.
        min_tokens: No end before this many tokens.
        stop: A text, or several, that end the turn; the reply's text ends before it.
        stop_token_ids: Ids that end the turn; the one drawn is part of it.
        ignore_eos: The end-of-text token does not end the turn.
        queue_timeout_s: Longest wait for the first step in seconds, else `QueueTimeout`.
        time_limit_s: Longest run from the first step on in seconds; then the turn ends TIME_LIMIT.
        priority: Higher runs first.
        expected_revision: Refuse with `RevisionMismatch` where the session has another one.
        request_id: A UUID; the same call once more with it gets the first one's tokens: of a turn that
            was cut and kept (`keep_partial`) those that it had, ending CANCELLED.
        keep_partial: A cancel, disconnect or deadline commits the input and the tokens so far.
            Otherwise the turn never happened.
        token_timing: Fill `Chunk.timings`.
    """

    raw: bool
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    queue_timeout_s: float | None
    time_limit_s: float | None
    priority: int | None
    expected_revision: int | None
    request_id: str | UUID | None
    keep_partial: bool
    token_timing: bool
