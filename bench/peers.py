"""`pagecast bench peers`: the same cases on our engine and on others, in turn.

Of each case every engine runs once in a round, and the order turns from round to round, so that a machine
that slows down slows everybody. A first round is nobody's: engines warm up in it. Who waits is stopped. Knows
engines as those who run cases, and nothing of what is inside them.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench import peer_driver
from bench.peer_cases import LLAMA_CPP, ONNXRUNTIME, OPENVINO, TRANSFORMERS, Case, Group
from bench.peer_engines import Engine, EngineFailed, LlamaCpp, SpokenEngine

OURS = "Pagecast"


@dataclass(frozen=True, slots=True)
class Places:
    """Where peers and their weights are, as `peer_setup` lays them.

    Attributes:
        folder: Of all peers.
        model: Our own file, of Q4_1.
    """

    folder: Path
    model: Path

    @property
    def llama_cpp(self) -> Path:
        """Folder of llama.cpp's programs."""
        return self.folder / "llama.cpp"

    @property
    def float32_folder(self) -> Path:
        """The weights as float32, as transformers and the builder of onnxruntime-genai read them."""
        return self.folder / "transformers-float32"

    def weights(self, name: str) -> Path:
        """GGUF file of these weights."""
        return self.model if name == "Q4_1" else self.folder / f"{name}.gguf"

    def python(self, environment: str) -> Path:
        """Of `openvino`, `onnxruntime` or `transformers`."""
        return self.folder / environment / "bin" / "python"

    def onnx(self, weights: str) -> Path:
        """What the builder of onnxruntime-genai made beside these weights."""
        return self.folder / f"onnxruntime-{'fp32' if weights == 'F32' else 'int4'}"


@dataclass(frozen=True, slots=True)
class Promise:
    """One target, and what came of it.

    Attributes:
        text: What is to be reached, beside what was measured.
        passed: Whether it was.
    """

    text: str
    passed: bool


@dataclass(frozen=True, slots=True)
class Found:
    """One case.

    Attributes:
        group: It is of.
        case: What was run.
        ours_ms: Samples.
        theirs_ms: Samples by peer, of those that ran it.
        failed: Why a peer did not, by peer.
        floor_ms: Of a decode step; None of a first token.
    """

    group: Group
    case: Case
    ours_ms: tuple[float, ...]
    theirs_ms: Mapping[str, tuple[float, ...]]
    failed: Mapping[str, str]
    floor_ms: float | None

    @property
    def ms(self) -> float:
        """Our median."""
        return statistics.median(self.ours_ms)

    def ratio(self, peer: str) -> float:
        """The peer's median over ours: how many times as fast we are."""
        return statistics.median(self.theirs_ms[peer]) / self.ms

    def promises(self) -> list[Promise]:
        """Every target that could be judged."""
        promised = []
        most = self.case.most_times_floor
        name = f"{self.group.name}, {self.case.name}"
        if most is not None and self.floor_ms is not None:
            times = self.ms / self.floor_ms
            promised.append(Promise(f"{name}: {times:.2f} x floor, at most {most}", times <= most))
        for peer, least in self.case.targets.items():
            if peer in self.theirs_ms:
                ratio = self.ratio(peer)
                promised.append(Promise(f"{name}: {ratio:.2f} x {peer}, at least {least}", ratio >= least))
        return promised


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that was measured.

    Attributes:
        found: Case by case.
        versions: Of engines that ran.
        missing: Why an engine did not, by group and engine; by group alone where our own file is not there.
        bandwidths: Bytes per second, of every group's rounds.
    """

    found: tuple[Found, ...]
    versions: Mapping[str, str]
    missing: Mapping[str, str]
    bandwidths: tuple[float, ...]


class Starter(Protocol):
    """Starts engines for a group."""

    def absent(self, group: Group) -> str | None:
        """Why our own engine can't be started: its file is not there. None: it is."""

    def ours(self, group: Group) -> SpokenEngine:
        """Our own. Raises EngineFailed where it does not run."""

    def peer(self, name: str, group: Group) -> Engine:
        """The peer of that name. Raises EngineFailed where it is not to be had."""


class Engines:
    """Starts what lies at its place.

    Args:
        places: Where peers and weights are.
        threads: Of every engine.
        kv_dtype: Ours.
        logs: Folder for what engines write.
    """

    def __init__(self, places: Places, threads: int, kv_dtype: str, logs: Path) -> None:
        self._places = places
        self._threads = str(threads)
        self._kv_dtype = kv_dtype
        self._logs = logs

    def absent(self, group: Group) -> str | None:
        """See `Starter`."""
        weights = self._places.weights(group.weights)
        return None if weights.exists() else f"{weights} is not there"

    def ours(self, group: Group) -> SpokenEngine:
        """See `Starter`."""
        model = self._existing(OURS, self._places.weights(group.weights))
        command = [sys.executable, "-P", "-m", "bench.peer_pagecast", str(model), self._threads]
        command += ["file", group.activations, self._kv_dtype]
        return SpokenEngine(OURS, command, self._logs / f"pagecast-{group.name}.log")

    def peer(self, name: str, group: Group) -> Engine:
        """See `Starter`."""
        weights = self._places.weights(group.weights)
        if name == LLAMA_CPP:
            return LlamaCpp(self._places.llama_cpp, self._existing(name, weights), int(self._threads))
        environment, place = {
            OPENVINO: ("openvino", weights),
            ONNXRUNTIME: ("onnxruntime", self._places.onnx(group.weights)),
            TRANSFORMERS: ("transformers", self._places.float32_folder),
        }[name]
        python = self._existing(name, self._places.python(environment))
        model = self._existing(name, place)
        driver = Path(peer_driver.__file__)
        command = [str(python), "-P", str(driver), environment, str(model), self._threads]
        return SpokenEngine(name, command, self._logs / f"{environment}-{group.name}.log")

    def _existing(self, name: str, path: Path) -> Path:
        if not path.exists():
            raise EngineFailed(f"{name}: {path} is not there")
        return path


def compare(
    groups: Sequence[Group],
    peers: Sequence[str],
    rounds: int,
    starter: Starter,
    on_found: Callable[[Found], None] | None = None,
) -> Comparison:
    """Runs every case of the groups.

    Args:
        groups: What is run.
        peers: Who may run it beside us.
        rounds: Samples of each engine and case, at least.
        starter: Starts engines.
        on_found: Told of each case when it is done.

    Raises:
        EngineFailed: Our own engine did not run, though its file is there. A peer that does not run is told
            of, and so is a group without a file of ours.
    """
    found: list[Found] = []
    versions: dict[str, str] = {}
    # Before the first case: what is not there must not be found out after minutes.
    absent = {group.name: starter.absent(group) for group in groups}
    missing = {name: reason for name, reason in absent.items() if reason is not None}
    bandwidths: list[float] = []
    for group in groups:
        if absent[group.name] is not None:
            continue
        with ExitStack() as stack:
            ours = starter.ours(group)
            stack.callback(ours.close)
            theirs: dict[str, Engine] = {}
            for name in (peer for peer in group.peers if peer in peers):
                try:
                    theirs[name] = starter.peer(name, group)
                except EngineFailed as error:
                    missing[f"{group.name}, {name}"] = str(error).removeprefix(f"{name}: ")
                else:
                    stack.callback(theirs[name].close)
            for case in group.cases:
                found.append(_run_case(group, case, ours, theirs, rounds, bandwidths))
                if on_found is not None:
                    on_found(found[-1])
            versions |= {name: engine.version for name, engine in theirs.items()}
    return Comparison(tuple(found), versions, missing, tuple(bandwidths))


def _run_case(
    group: Group,
    case: Case,
    ours: SpokenEngine,
    theirs: Mapping[str, Engine],
    rounds: int,
    bandwidths: list[float],
) -> Found:
    engines: dict[str, Engine] = {OURS: ours, **theirs}
    samples: dict[str, list[float]] = {name: [] for name in engines}
    failed: dict[str, str] = {}
    reads = []
    order = list(engines)
    for number in range(1 + -(-rounds // case.repeats)):
        reads.append(float(ours.ask({"what": "read"})["bytes_per_s"]))
        for name in order:
            if name in failed:
                continue
            try:
                times = engines[name].run(case)
            except EngineFailed as error:
                if name == OURS:
                    raise
                failed[name] = str(error)
                continue
            if number > 0:
                samples[name] += times
        order = [*order[1:], order[0]]
    bandwidths += reads[1:]
    return Found(
        group=group,
        case=case,
        ours_ms=tuple(samples[OURS]),
        theirs_ms={name: tuple(samples[name]) for name in theirs if name not in failed},
        failed=failed,
        floor_ms=_floor_ms(ours, case, statistics.median(reads[1:])),
    )


def _floor_ms(ours: SpokenEngine, case: Case, bandwidth: float) -> float | None:
    if case.what != "decode":
        return None
    sizes = {"sessions": case.sessions, "context": case.context, "tokens": case.tokens}
    return float(ours.ask({"what": "floor"} | sizes)["bytes"]) / bandwidth * 1e3
