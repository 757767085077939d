"""A step that was launched on a device and is not read yet. Knows memory and marks, no kernels."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from worker.plan.device import Mark


class Landed(NamedTuple):
    """What a step brought to the host.

    Attributes:
        ids: [logits rows] int32: the token that was drawn, -1 where none could be; of rows that are not drawn
            on the device anything.
        logprobs: [logits rows] float32; None: not asked for.
        logits: [vocab] float32 of each row that was asked for, by its place among the logits rows.
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32] | None
    logits: dict[int, npt.NDArray[np.float32]]


class Flight:
    """Copies to the host that are under way, and all that the device still reads meanwhile.

    Args:
        ids: [logits rows] int32 in host memory that nothing else uses.
        logprobs: Likewise, float32; None: not asked for.
        logits: Rows of logits, likewise, by place.
        done: Behind all copies.
        kept: What must outlive the launches.
        host_bytes: What the step copies, both ways.
    """

    def __init__(
        self,
        *,
        ids: Tensor,
        logprobs: Tensor | None,
        logits: dict[int, Tensor],
        done: Mark,
        kept: object,
        host_bytes: int,
    ) -> None:
        self._ids = ids
        self._logprobs = logprobs
        self._logits = logits
        self._done = done
        self._kept: object | None = kept
        self.host_bytes = host_bytes

    def land(self) -> Landed:
        """Waits for the step and gives what it copied. Raises what the device failed with."""
        self._done.wait()
        self._kept = None
        return Landed(
            self._ids.numpy(),
            None if self._logprobs is None else self._logprobs.numpy(),
            {place: row.numpy() for place, row in self._logits.items()},
        )
