"""`pagecast bench decode`: decode steps and first tokens beside the floor, in process.

Every number of sessions decodes at the first context, and the first number of sessions at every other
one. A round reads the machine's bandwidth, runs each case once and reads it again; sessions start each round
from the same place, so that rounds differ by what else the machine does and by nothing else. Knows the runner
as the engine does, and no gRPC.
"""

import gc
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from bench.floor import Reader, token_bytes, weight_bytes
from bench.loading import BLOCK_SIZE, MAX_STEP_ROWS, Bench, scattered_tables
from bench.sessions import Sessions
from worker.runner import Runner

LEAST_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Wish:
    """What is measured.

    Attributes:
        sessions: Numbers of sessions.
        contexts: Tokens of prompt, per session.
        prompts: Lengths of prompts whose first token is timed.
        tokens: Drawn per session in a round.
        rounds: Of each case; medians are over them.
    """

    sessions: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    tokens: int
    rounds: int

    def decodes(self) -> list[tuple[int, int]]:
        """Sessions and context of every decode case."""
        return [
            *((number, context) for context in self.contexts[:1] for number in self.sessions),
            *((number, context) for context in self.contexts[1:] for number in self.sessions[:1]),
        ]


@dataclass(frozen=True, slots=True)
class Decode:
    """One number of sessions that decode at one context.

    Attributes:
        sessions: Rows of every step.
        context: Tokens of each session's prompt.
        step_ms: Of each round, the mean step; a step draws one token for each session, draw included.
        token_ms: Every step's time, all rounds.
        floor_ms: Bytes of a step over the median of the rounds' bandwidths.
        read_bytes: What a step reads at its mean context: weights, keys and values.
    """

    sessions: int
    context: int
    step_ms: tuple[float, ...]
    token_ms: tuple[float, ...]
    floor_ms: float
    read_bytes: int

    @property
    def ms(self) -> float:
        """Median step."""
        return statistics.median(self.step_ms)

    @property
    def tokens_per_s(self) -> float:
        """Of all sessions."""
        return self.sessions * 1e3 / self.ms

    @property
    def times_floor(self) -> float:
        """Median step over floor."""
        return self.ms / self.floor_ms


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A session that has nothing computed yet.

    Attributes:
        prompt: Its tokens.
        times_ms: From nothing to its first token, of each round.
    """

    prompt: int
    times_ms: tuple[float, ...]

    @property
    def ms(self) -> float:
        """Median."""
        return statistics.median(self.times_ms)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run gave.

    Attributes:
        decodes: By case.
        first_tokens: By length of prompt.
        bandwidths: Bytes per second of each round.
        weight_bytes: What every step reads of weights.
    """

    decodes: tuple[Decode, ...]
    first_tokens: tuple[FirstToken, ...]
    bandwidths: tuple[float, ...]
    weight_bytes: int

    @property
    def bandwidth(self) -> float:
        """Median, in bytes per second."""
        return statistics.median(self.bandwidths)


class Decoder:
    """Sessions of every case over one runner and one pool, with their prompts computed.

    Args:
        bench: What is measured.
        wish: What of it.

    Raises:
        ValueError: A number does not fit the model or a step.
    """

    def __init__(self, bench: Bench, wish: Wish) -> None:
        self.wish = wish
        check_wish(bench, wish)
        drawn = wish.tokens + 1
        sizes = [
            *((number, context, context + drawn) for number, context in wish.decodes()),
            *((1, prompt, prompt + 1) for prompt in wish.prompts),
        ]
        num_blocks = sum(number * -(-total // BLOCK_SIZE) for number, _, total in sizes)
        self.kv = bench.pool(num_blocks)
        self._runner: Runner = bench.runner(self.kv)
        self._runner.warm_up()
        free = scattered_tables(num_blocks, 1, num_blocks)
        made = []
        for number, context, total in sizes:
            each = -(-total // BLOCK_SIZE)
            tables = [tuple(free.pop()[0] for _ in range(each)) for _ in range(number)]
            prompts = random_prompts(number, context, bench.llama.config.vocab_size)
            made.append(Sessions(self._runner, prompts, tables, max_step_tokens=bench.max_step_tokens))
        self._decoding = made[: len(wish.decodes())]
        self._starting = made[len(wish.decodes()) :]
        for sessions in self._decoding:
            sessions.prefill()

    def decode(self, case: int) -> list[float]:
        """One round of a decode case; returns the steps' times in ms."""
        self._decoding[case].rewind()
        return [step_ns / 1e6 for step_ns in self._decoding[case].decode(self.wish.tokens)]

    def first_token(self, case: int) -> float:
        """One round of a first-token case; returns its time in ms."""
        self._starting[case].forget()
        return self._starting[case].prefill() / 1e6


def check_wish(bench: Bench, wish: Wish) -> None:
    """Raises ValueError for what can't be measured; names the option."""
    if wish.rounds < 1 or wish.tokens < 1:
        raise ValueError("--rounds, --tokens: must be at least 1")
    if max(wish.sessions, default=0) > MAX_STEP_ROWS:
        raise ValueError(f"--sessions: {max(wish.sessions)} are over {MAX_STEP_ROWS}")
    most = bench.llama.config.max_context_tokens
    if max(wish.contexts, default=0) + wish.tokens + 1 > most:
        raise ValueError(
            f"--context, --tokens: {max(wish.contexts)} + {wish.tokens} + 1 are over the model's {most}"
        )
    if wish.prompts and max(wish.prompts) + 1 > most:
        raise ValueError(f"--prompt: {max(wish.prompts)} + 1 are over the model's {most}")


def random_prompts(num_prompts: int, num_tokens: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of ids that are drawn at random, the same ones for the same numbers."""
    rng = random.Random(f"{seed} {num_prompts} {num_tokens}")  # noqa: S311 - no secret
    return [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)]


def measure(
    bench: Bench, wish: Wish, reader: Reader, on_round: Callable[[int], None] | None = None
) -> Figures:
    """Measures every case in every round.

    Args:
        bench: What is measured.
        wish: What of it.
        reader: Tells the bandwidth.
        on_round: Told each round's number when it is done.

    Raises:
        ValueError: As `Decoder`.
        ArithmeticError: A logit is not a number.
    """
    decoder = Decoder(bench, wish)
    bandwidths: list[float] = []
    steps: list[list[list[float]]] = [[] for _ in wish.decodes()]
    firsts: list[list[float]] = [[] for _ in wish.prompts]
    for number in range(wish.rounds):
        gc.collect()
        reads = [reader.read()]
        for case, found in enumerate(steps):
            found.append(decoder.decode(case))
            reads.append(reader.read())
        for case, times in enumerate(firsts):
            times.append(decoder.first_token(case))
        bandwidths.append(max(reads))
        if on_round is not None:
            on_round(number)
    weights, bandwidth = weight_bytes(bench), statistics.median(bandwidths)
    of_token = token_bytes(decoder.kv)
    decodes = []
    for (sessions, context), found in zip(wish.decodes(), steps, strict=True):
        read_bytes = weights + round(sessions * of_token * mean_context(context, wish.tokens))
        decodes.append(
            Decode(
                sessions=sessions,
                context=context,
                step_ms=tuple(statistics.fmean(times) for times in found),
                token_ms=tuple(time for times in found for time in times),
                floor_ms=read_bytes / bandwidth * 1e3,
                read_bytes=read_bytes,
            )
        )
    first_tokens = tuple(
        FirstToken(prompt, tuple(times)) for prompt, times in zip(wish.prompts, firsts, strict=True)
    )
    return Figures(tuple(decodes), first_tokens, tuple(bandwidths), weights)


def mean_context(prompt: int, tokens: int) -> float:
    """Tokens that a session attends in the mean of `tokens` decode steps behind its first drawn token."""
    return prompt + (tokens + 1) / 2
