"""Sessions as the engine keeps them, for tests that launch steps and read them later."""

from collections.abc import Sequence

from worker.batch import UNKNOWN_TOKEN, Batch, DecodePlan, Row, TokenClass
from worker.params import Sampling
from worker.runner import Launched, Runner
from worker.sampling import Draw

GREEDY = Sampling()
WARM = Sampling(temperature=0.9, seed=11, top_k=40)


class Session:
    """A log that is computed as the engine would, and its blocks."""

    def __init__(self, name: str, prompt: Sequence[int], blocks: Sequence[int], sampling=GREEDY) -> None:
        self.name, self.blocks, self.sampling = name, tuple(blocks), sampling
        self.log = list(prompt)
        self.num_computed = 0
        self.num_input = len(prompt)

    def row(self, *, most=1000, plan=DecodePlan.PLAN_ONCE) -> Row:
        is_input = self.num_computed < self.num_input
        end = min(self.num_input if is_input else len(self.log), self.num_computed + most)
        self.num_computed, start = end, self.num_computed
        return Row(
            self.name,
            tuple(self.log[start:end]),
            start,
            self.blocks[: -(-end // 16)],
            end == len(self.log),
            plan,
            TokenClass.PREFILL if is_input else TokenClass.DECODE,
        )

    def draw(self) -> Draw:
        return Draw(self.sampling, tuple(self.log), len(self.log) - self.num_input, frozenset())

    def launched(self) -> None:
        self.log.append(UNKNOWN_TOKEN)

    def read(self, token_id: int) -> None:
        self.log[self.log.index(UNKNOWN_TOKEN)] = token_id


def launch(runner: Runner, sessions: Sequence[Session], **changes) -> tuple[list[Session], Launched]:
    rows = [session.row(**changes) for session in sessions]
    drawing = [session for session, row in zip(sessions, rows, strict=True) if row.wants_logits]
    launched = runner.launch(Batch(tuple(rows)), [session.draw() for session in drawing])
    for session in drawing:
        session.launched()
    return drawing, launched


def read(step: tuple[list[Session], Launched]) -> list[int]:
    drawing, launched = step
    drawn = [each.token_id for each in launched.read().drawn]
    for session, token_id in zip(drawing, drawn, strict=True):
        session.read(token_id)
    return drawn


def four_sessions() -> list[Session]:
    return [
        Session("a", range(3, 24), range(10, 20)),
        Session("b", range(40, 75), range(30, 40), WARM),
        Session("c", (7, 8, 9), range(50, 60)),
        Session("d", (9,), (4, 60, 2, 61), WARM),
    ]
