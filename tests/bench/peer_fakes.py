"""Children that compute nothing, for `bench peers`: who starts them, and cases for them."""

import sys
from pathlib import Path

from bench.peer_cases import LLAMA_CPP, OPENVINO, Case, Group
from bench.peer_engines import Engine, EngineFailed, SpokenEngine
from bench.peers import OURS

FAKE = Path(__file__).with_name("fake_engine.py")
GROUP = Group(
    "Q4_1",
    "int8",
    (LLAMA_CPP, OPENVINO),
    (
        Case("decode", 4, 128, 8, most_times_floor=1.4, targets={LLAMA_CPP: 1.5, OPENVINO: 3.0}),
        Case("first_token", 1, 2048, 1, repeats=3, targets={LLAMA_CPP: 2.0}),
    ),
)


class Fakes:
    """Starts children by these arguments; a peer without any is not to be had."""

    def __init__(self, folder: Path, **arguments: tuple[str, ...]) -> None:
        self.folder = folder
        self.arguments = arguments
        self.started: list[SpokenEngine] = []
        self.without_file: set[str] = set()

    def absent(self, group: Group) -> str | None:
        return f"{group.weights}.gguf is not there" if group.weights in self.without_file else None

    def ours(self, group: Group) -> SpokenEngine:
        return self._start(OURS, self.arguments.get("ours", ("2.5",)))

    def peer(self, name: str, group: Group) -> Engine:
        short = {LLAMA_CPP: "llama", OPENVINO: "openvino"}[name]
        if short not in self.arguments:
            raise EngineFailed(f"{name}: is not there")
        return self._start(name, self.arguments[short])

    def _start(self, name: str, arguments: tuple[str, ...]) -> SpokenEngine:
        command = [
            sys.executable,
            str(FAKE),
            str(self.folder / "journal"),
            name.split(maxsplit=1)[0],
            *arguments,
        ]
        self.started.append(SpokenEngine(name, command, self.folder / f"{name}.log"))
        return self.started[-1]

    def journal(self) -> list[str]:
        return (self.folder / "journal").read_text().splitlines()
