"""What `pagecast bench peers` runs: the same weights on both sides, and what is to be reached beside whom.

Values alone: knows no engine and no process.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

LLAMA_CPP, OPENVINO = "llama.cpp", "OpenVINO GenAI"
ONNXRUNTIME, TRANSFORMERS = "onnxruntime-genai", "transformers"

PEERS = {
    "llama.cpp": LLAMA_CPP,
    "openvino": OPENVINO,
    "onnxruntime": ONNXRUNTIME,
    "transformers": TRANSFORMERS,
}
"""What `--peer` takes, and whom it means."""

What = Literal["decode", "first_token"]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that every engine does.

    Attributes:
        what: Decode steps, or a first token.
        sessions: That decode at once; 1 for a first token.
        context: Tokens of prompt.
        tokens: Drawn per session; for a first token 1.
        repeats: Samples that an engine gives each time it is asked; more than 1 where the prompt is dear.
        most_times_floor: What our time may be, as a multiple of the floor; None: nothing is promised.
        targets: By peer, what its time over ours has to be.
    """

    what: What
    sessions: int
    context: int
    tokens: int
    repeats: int = 1
    most_times_floor: float | None = None
    targets: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """In words."""
        if self.what == "first_token":
            return f"first token, prompt of {self.context:,}"
        sessions = "1 session" if self.sessions == 1 else f"{self.sessions} sessions"
        return f"{sessions}, context {self.context:,}"


@dataclass(frozen=True, slots=True)
class Group:
    """Cases on one file.

    Attributes:
        weights: Format of its matrices: `Q4_1`, `Q4_0`, `Q8_0` or `F32`.
        activations: Ours.
        peers: Who runs the cases beside us.
        cases: In order.
    """

    weights: str
    activations: Literal["int8", "float32", "bfloat16"]
    peers: tuple[str, ...]
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        """What `--group` takes."""
        return f"{self.weights}-{self.activations}"

    def only(self, contexts: Collection[int]) -> "Group":
        """The same with cases of these contexts alone; all of them for none."""
        return replace(
            self, cases=tuple(case for case in self.cases if not contexts or case.context in contexts)
        )


def _decode(
    sessions: int, context: int = 128, *, floor: float | None = None, repeats: int = 1, **targets: float
) -> Case:
    return Case("decode", sessions, context, 32, repeats, floor, _by_peer(targets))


def _first(prompt: int, **targets: float) -> Case:
    return Case("first_token", 1, prompt, 1, targets=_by_peer(targets))


def _by_peer(targets: Mapping[str, float]) -> dict[str, float]:
    names = {"llama": LLAMA_CPP, "openvino": OPENVINO}
    return {names[short]: ratio for short, ratio in targets.items()}


GROUPS = (
    Group(
        "Q4_1",
        "int8",
        (LLAMA_CPP, OPENVINO),
        (
            _decode(1, floor=1.4, llama=1.8),
            _decode(4, llama=3.3, openvino=3.0),
            _decode(16, llama=3.7, openvino=2.0),
            _decode(1, 2048, llama=2.8),
            _decode(1, 8000, llama=2.8, repeats=3),
            _first(128, llama=3.7, openvino=1.6),
            _first(2048, llama=3.7, openvino=1.6),
        ),
    ),
    Group(
        "Q4_1",
        "bfloat16",
        (LLAMA_CPP, OPENVINO),
        (
            _decode(1),
            _decode(16),
            _first(128, llama=3.7, openvino=1.6),
            _first(2048, llama=3.7, openvino=1.6),
        ),
    ),
    Group(
        "Q4_1",
        "float32",
        (LLAMA_CPP,),
        (_decode(1, llama=1.1), _decode(16, llama=2.0), _first(128, llama=1.8)),
    ),
    Group(
        "Q4_0",
        "int8",
        (LLAMA_CPP, ONNXRUNTIME),
        (_decode(1, llama=1.5), _decode(16, llama=2.0), _first(128, llama=1.5)),
    ),
    Group(
        "F32",
        "float32",
        (LLAMA_CPP, ONNXRUNTIME, TRANSFORMERS),
        (_decode(1, floor=1.12), _decode(16, llama=2.0), _first(128)),
    ),
    Group("Q8_0", "int8", (LLAMA_CPP,), (_decode(1, llama=1.4), _decode(16, llama=2.7))),
)
"""onnxruntime-genai runs weights of its own: int4 beside Q4_0, float32 beside F32."""


def chosen_groups(names: Collection[str], contexts: Collection[int]) -> list[Group]:
    """Groups of these names with cases of these contexts, those without a case left out; for none, all.

    Raises:
        ValueError: A context is that of no case.
    """
    named = [group for group in GROUPS if not names or group.name in names]
    known = sorted({case.context for group in named for case in group.cases})
    for context in contexts:
        if context not in known:
            had = ", ".join(map(str, known))
            raise ValueError(f"--context: no case has {context}; cases have {had}")
    return [narrowed for group in named if (narrowed := group.only(contexts)).cases]
