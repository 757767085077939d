"""What the sections of the GPU check exchange: a setting, cases and lines. Knows no torch and no kernel."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    """What a section is run on.

    Attributes:
        device: `cuda`, or `cpu`: Triton's interpreter, which tries the check itself on tiny sizes.
        seconds: What the section may take.
        is_dry: Whether cases are only listed; nothing runs then, and sizes are those of a GPU.
        compiles_alone: Whether kernels are compiled and none is launched: cases need not repeat anything, and
            nothing that they find means anything.
    """

    device: str
    seconds: float
    is_dry: bool = False
    compiles_alone: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f"device={self.device!r} is neither cuda nor cpu")
        if not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds} is not above 0")

    @property
    def is_tiny(self) -> bool:
        """Whether sizes are those that an interpreter gets done."""
        return self.device == "cpu" and not self.is_dry

    @property
    def judges_speed(self) -> bool:
        """Whether times are held against what they should be."""
        return self.device == "cuda"


@dataclass(frozen=True, slots=True)
class Line:
    """One figure, one check, or both.

    Attributes:
        name: What was measured or checked.
        value: The figure, if there is one.
        unit: Of it.
        floor: What it can't be better than, in the same unit.
        passed: Whether it is as it must be; None: a figure, nothing is promised of it.
        note: More about it; of a check that failed, why.
    """

    name: str
    value: float | None = None
    unit: str = ""
    floor: float | None = None
    passed: bool | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """Floor over value: 1 is as good as can be."""
        return self.floor / self.value if self.floor is not None and self.value else None


@dataclass(frozen=True, slots=True)
class Case:
    """Something that a section runs.

    Attributes:
        name: What, with its sizes.
        run: Gives lines; an exception is a failure of this case alone.
        plan: How it would run, where that is worked out for a dry run.
    """

    name: str
    run: Callable[[], Iterable[Line]]
    plan: str = ""


class Clock:
    """How much of a section's time is left.

    Args:
        seconds: From now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def is_over(self) -> bool:
        """Whether it is up."""
        return time.perf_counter() >= self._end


def run_cases(cases: Iterable[Case], clock: Clock) -> Iterable[Line]:
    """Lines of all cases; one that fails is a line that did not pass, and what is late is left out."""
    for case in cases:
        if clock.is_over:
            yield Line(case.name, note="left out: the section's time is up")
            continue
        try:
            yield from case.run()
        except Exception as error:  # noqa: BLE001 - one case must not end the others
            lines = str(error).strip().splitlines() or [""]
            yield Line(case.name, passed=False, note=f"{type(error).__name__}: {lines[0][:300]}")
