"""How a generation's tokens are drawn and when it stops: values that requests become. A leaf."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class Sampling:
    """Effective sampling of one generation; the defaults are the public API's.

    Attributes:
        temperature: 0 is greedy.
        top_k: Candidates kept; None: all.
        top_p: Share of the probability kept, over 0.
        min_p: Least probability kept, relative to the most likely candidate's.
        seed: Draws come from (seed, stream, position in the log).
        repetition_penalty: Over 0; covers the whole log.
        presence_penalty: Covers this generation.
        frequency_penalty: Covers this generation.
        logit_bias: Token id to what is added to its logit.
        logprobs: Most likely tokens to tell beside the drawn one's logprob; None: no logprobs at all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """What a request or a session says about sampling; None where it says nothing.

    Fields are those of `Sampling`.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None

    def over(self, fallback: "SamplingChoice") -> "SamplingChoice":
        """These choices, and where there is none, those of `fallback`, field by field."""
        return SamplingChoice(
            **{
                each.name: getattr(fallback if getattr(self, each.name) is None else self, each.name)
                for each in fields(self)
            }
        )

    def effective(self, drawn_seed: int) -> Sampling:
        """The values that take effect: the API's default where nothing is said, `drawn_seed` for the seed."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        return Sampling(
            **{"seed": drawn_seed} | {name: value for name, value in said.items() if value is not None}
        )


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a generation ends.

    Attributes:
        max_tokens: Tokens to generate at most; None: up to the session's context.
        min_tokens: EOS and stop tokens are not drawn before this many, stop sequences not looked for.
        stop_sequences: Texts that end the turn; the turn's text ends before them.
        stop_token_ids: Ids that end the turn.
        eos_ids: Ids that end the turn as EOS; empty where EOS is to be ignored.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_sequences: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
