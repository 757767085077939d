"""Steps that were started, and what came of them. Knows how tokens are drawn, and no sessions."""

from collections.abc import Sequence
from time import monotonic_ns
from typing import Protocol

from worker.batch import Drawn
from worker.plan.device_policy import DeviceStep
from worker.plan.policy import StepDraws
from worker.sampling import Draw, draw_tokens


class Launched(Protocol):
    """A step that was started."""

    def read(self) -> StepDraws:
        """Waits for the step. To be called once, in the order of launches."""


class DeviceLaunched:
    """A step that runs on a device, and whose tokens it draws but for some."""

    def __init__(
        self, step: DeviceStep, draws: Sequence[Draw], on_host: Sequence[int], vocab_size: int
    ) -> None:
        self._step = step
        self._draws = draws
        self._on_host = on_host
        self._vocab_size = vocab_size

    def read(self) -> StepDraws:
        """See `Launched`."""
        landed, results = self._step.read()
        start_ns = monotonic_ns()
        drawn = [
            _drawn(int(token_id), draw, None if landed.logprobs is None else float(landed.logprobs[place]))
            for place, (token_id, draw) in enumerate(zip(landed.ids, self._draws, strict=True))
        ]
        on_host = draw_tokens(
            [landed.logits[place] for place in self._on_host],
            [self._draws[place] for place in self._on_host],
            vocab_size=self._vocab_size,
        )
        for place, found in zip(self._on_host, on_host, strict=True):
            drawn[place] = found
        return StepDraws(drawn, results, monotonic_ns() - start_ns)


def _drawn(token_id: int, draw: Draw, logprob: float | None) -> Drawn | None:
    if token_id < 0:
        return None
    return Drawn(token_id, logprob if draw.sampling.logprobs is not None else None)
