"""Section: a session's logits are the same bits whatever happens around it.

Each session computes its prompt, then some tokens one by one. That is played alone, beside others, in
another order, in chunks, over other blocks, with keys and values away and back in between, and with its own
tokens computed again at once, as after a preemption. The pool is full of NaN, which nobody may read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import torch
from torch import Tensor

from bench.gpu_models import BLOCK_SIZE, SHALLOW, TINY, random_llama, random_pool
from bench.gpu_values import Case, Line, Setting
from worker.batch import Batch, DecodePlan, Row, TokenClass
from worker.kv.storage import KvStorage
from worker.runner import Runner

_PROMPTS = (37, 16, 1, 150, 15, 33, 64, 90)
_TINY_PROMPTS = (19, 16, 1)


Played: TypeAlias = Iterator[tuple[int, list[Tensor]]]
"""Which session, and its logits in order, up to the last ones."""


@dataclass(frozen=True, slots=True)
class Session:
    """Its name, its ids (the prompt, then what it decodes), and where its keys and values go."""

    name: str
    prompt: tuple[int, ...]
    decoded: tuple[int, ...]
    table: tuple[int, ...]


class Stage:
    """A runner over a poisoned pool, in which every play gets blocks that no other had."""

    def __init__(self, setting: Setting, dtype: torch.dtype) -> None:
        self._setting = setting
        self._dtype = dtype
        self._config = TINY if setting.is_tiny else SHALLOW
        self._prompts = _TINY_PROMPTS if setting.is_tiny else _PROMPTS
        self._num_decoded = 3 if setting.is_tiny else 9
        self._blocks_each = -(-(max(self._prompts) + self._num_decoded) // BLOCK_SIZE)
        self._num_plays = 0

    @cached_property
    def kv(self) -> KvStorage:
        """Room for every play."""
        num_blocks = 10 * len(self._prompts) * self._blocks_each
        kv = random_pool(
            self._config, num_blocks, dtype=self._dtype, device=torch.device(self._setting.device)
        )
        kv.data.fill_(float("nan"))
        return kv

    @cached_property
    def runner(self) -> Runner:
        """One for all plays."""
        return Runner(
            random_llama(self._config, dtype=self._dtype, device=torch.device(self._setting.device)),
            self.kv,
            kernels="triton",
            max_step_tokens=64 if self._setting.is_tiny else 512,
            max_step_rows=len(self._prompts),
            vocab_size=self._config.vocab_size,
        )

    def warm_up(self) -> list[Line]:
        """Runs the launches of all sizes once."""
        self.runner.warm_up()
        return []

    def sessions(self) -> list[Session]:
        """The same ids, of new names and over new blocks, which lie backwards in every second play."""
        play, self._num_plays = self._num_plays, self._num_plays + 1
        found = []
        for at, length in enumerate(self._prompts):
            start = (play * len(self._prompts) + at) * self._blocks_each
            table = tuple(range(start, start + self._blocks_each))
            ids = [
                (7 * at + 3 * place) % self._config.vocab_size for place in range(length + self._num_decoded)
            ]
            prompt, decoded = tuple(ids[:length]), tuple(ids[length:])
            found.append(Session(f"{play}-{at}", prompt, decoded, table[:: -1 if play % 2 else 1]))
        return found

    def run(self, rows: Sequence[Row]) -> list[Tensor]:
        """Logits of each row, bits as int32."""
        logits = self.runner.run(Batch(tuple(rows))).logits
        return list(torch.as_tensor(logits).clone().view(torch.int32))

    def alone(self, session: Session, chunk: int = 1 << 20) -> list[Tensor]:
        """Prompt in chunks, then token by token."""
        for start in range(0, len(session.prompt), chunk):
            ids = session.prompt[start : start + chunk]
            (found,) = self.run([_row(session, ids, start, TokenClass.PREFILL)])
        return [found, *self.decode(session)]

    def decode(self, session: Session) -> list[Tensor]:
        """Token by token."""
        first = len(session.prompt)
        return [
            self.run([_row(session, (token,), first + at, TokenClass.DECODE)])[0]
            for at, token in enumerate(session.decoded)
        ]

    def together(self, sessions: Sequence[Session], plan: DecodePlan) -> list[list[Tensor]]:
        """All prompts in one step, then a token of each per step."""
        found = [
            [logits]
            for logits in self.run([_row(s, s.prompt, 0, TokenClass.PREFILL, plan) for s in sessions])
        ]
        for at in range(self._num_decoded):
            rows = [
                _row(s, s.decoded[at : at + 1], len(s.prompt) + at, TokenClass.DECODE, plan) for s in sessions
            ]
            for own, logits in zip(found, self.run(rows), strict=True):
                own.append(logits)
        return found

    @cached_property
    def expected(self) -> list[list[Tensor]]:
        """Of each session alone."""
        return [self.alone(session) for session in self.sessions()]


def _row(
    session: Session,
    ids: Sequence[int],
    position: int,
    token_class: TokenClass,
    plan: DecodePlan = DecodePlan.PLAN_ONCE,
) -> Row:
    return Row(session.name, tuple(ids), position, session.table, True, plan, token_class)


Play: TypeAlias = Callable[[Stage], Played]


def _finite(stage: Stage) -> Played:
    for at, logits in enumerate(stage.expected):
        if not all(each.view(torch.float32).isfinite().all() for each in logits):
            raise ArithmeticError(f"session {at}: logits are not finite")
    yield from enumerate(stage.expected)


def _beside_others(stage: Stage, plan: DecodePlan = DecodePlan.PLAN_ONCE) -> Played:
    yield from enumerate(stage.together(stage.sessions(), plan))


def _other_order(stage: Stage) -> Played:
    found = stage.together(stage.sessions()[::-1], DecodePlan.PLAN_ONCE)
    yield from enumerate(found[::-1])


def _in_chunks(stage: Stage) -> Played:
    for at, session in enumerate(stage.sessions()):
        yield at, stage.alone(session, chunk=7 + at)


def _away_and_back(stage: Stage) -> Played:
    """Blocks go to host memory after the prompt and come back in others' places."""
    sessions, others = stage.sessions(), stage.sessions()
    for at, (session, other) in enumerate(zip(sessions, others, strict=True)):
        stage.run([_row(session, session.prompt, 0, TokenClass.PREFILL)])
        places = range(len(session.table))
        host = stage.kv.host_blocks(len(places))
        with stage.runner.in_order():
            stage.kv.evict(session.table, host, places)
            stage.kv.zero(session.table)
            stage.kv.restore(host, places, other.table)
        # Its last logits are read before `host` goes.
        yield at, stage.decode(other)


def _computed_again(stage: Stage) -> Played:
    """What was decoded token by token is computed at once, in its own class."""
    for at, session in enumerate(stage.sessions()):
        stage.run([_row(session, session.prompt, 0, TokenClass.PREFILL)])
        yield at, stage.run([_row(session, session.decoded, len(session.prompt), TokenClass.DECODE)])


_PLAYS: dict[str, Play] = {
    "finite logits": _finite,
    "beside others": _beside_others,
    "beside others, replanned": partial(_beside_others, plan=DecodePlan.REPLAN),
    "in another order": _other_order,
    "in chunks": _in_chunks,
    "evicted and restored": _away_and_back,
    "computed again at once": _computed_again,
}


def cases(setting: Setting) -> list[Case]:
    """Every way to play, in each dtype."""
    found = []
    for dtype in (torch.float32,) if setting.is_tiny else (torch.bfloat16, torch.float32):
        stage = Stage(setting, dtype)
        if setting.compiles_alone:
            found.append(Case(f"kernels of {dtype}", stage.warm_up))
            continue
        for name, play in _PLAYS.items():
            label = f"{name}, {dtype}"
            found.append(Case(label, partial(_compare, stage, label, play)))
    return found


def _compare(stage: Stage, label: str, play: Play) -> Iterator[Line]:
    wrong = [
        f"session {at}, logits {number}"
        for at, logits in play(stage)
        for number, (expected, found) in enumerate(
            zip(stage.expected[at][-len(logits) :], logits, strict=True)
        )
        if not torch.equal(expected, found)
    ]
    note = f"other bits than alone: {', '.join(wrong[:4])}" if wrong else ""
    yield Line(label, passed=not wrong, note=note)
