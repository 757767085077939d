"""Imports point one way: who may import whom, and what must not be loaded with what."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module, or all of a package, and the rooms of the same tree that it may import.
WORKER_ROOMS: dict[str, set[str]] = {
    "batch": set(),
    "errors": set(),
    "access": set(),
    "config": {"batch"},
    "params": set(),
    "session": {"batch"},
    "sampling": {"batch", "params"},
    "stops": set(),
    "detokenize": set(),
    "kv": {"errors"},
    "scheduler": {"batch", "errors", "session", "kv"},
    "kernels": {"batch"},
    "model": {"kernels"},
    "plan": {"batch", "kv", "model", "kernels", "sampling"},
    "runner": {"batch", "kv", "model", "kernels", "plan", "sampling"},
    "kernel_choice": {"kernels", "model", "plan"},
    "numerics": {"kernel_choice", "kv", "model"},
    "loading": {"config", "kernel_choice", "kv", "memory", "model", "numerics", "runner"},
    "commands": {"batch", "model", "params"},
    "turn": {"batch", "commands", "detokenize", "session", "stops"},
    "record": {"batch", "commands", "errors", "model", "params", "session", "turn"},
    "table": {
        *("batch", "commands", "detokenize", "errors", "model"),
        *("record", "scheduler", "session", "stops", "turn"),
    },
    "pipeline": {"batch", "runner", "sampling", "scheduler", "table", "turn"},
    "engine": {"commands", "errors", "model", "pipeline", "runner", "scheduler", "table"},
    "memory": set(),
    "checks": {"errors", "params"},
    "intake": {"checks", "commands", "detokenize", "errors", "model", "params"},
    "owners": {"errors"},
    "reports": set(),
    "wire": {"batch", "commands", "errors", "params"},
    "requests": {"checks", "commands", "errors", "intake", "params", "wire"},
    "server": {
        *("batch", "commands", "engine", "errors", "intake", "owners", "reports"),
        *("requests", "wire"),
    },
}
# What each top-level package may import of the others.
PACKAGES = {
    "pagecast": {"pagecast"},
    "service": {"service", "pagecast"},
    "worker": {"worker", "pagecast"},
    "bench": {"bench", "service", "worker", "pagecast"},
}
FOLDERS = {"pagecast": ROOT / "protos" / "pagecast"} | {
    name: ROOT / name for name in ("service", "worker", "bench")
}


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _modules(package: str) -> list[Path]:
    return [path for path in sorted(FOLDERS[package].rglob("*.py")) if "_pb2" not in path.name]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_meet_only_where_they_may(package: str) -> None:
    for path in _modules(package):
        tops = {name.split(".")[0] for name in _imports(path)} & PACKAGES.keys()
        assert tops <= PACKAGES[package], f"{path.relative_to(ROOT)} imports {tops - PACKAGES[package]}"


def test_rooms_of_the_worker_import_one_way() -> None:
    for path in _modules("worker"):
        room = path.relative_to(FOLDERS["worker"]).parts[0].removesuffix(".py")
        # `native` is a distribution of its own, which imports nothing of ours.
        if room in {"__init__", "__main__", "process", "native"}:
            continue
        imported = {name.split(".")[1] for name in _imports(path) if name.startswith("worker.")}
        wrong = imported - WORKER_ROOMS[room] - {room}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("pagecast", ("torch", "numpy", "service", "worker")),
        ("service.cli", ("torch", "numpy", "worker")),
        ("service.server", ("torch", "numpy", "triton", "gguf", "tokenizers", "worker")),
        ("worker.scheduler", ("torch", "numpy", "grpc")),
        ("worker.__main__", ("torch", "triton")),
        ("worker.runner", ("triton", "grpc")),
    ],
)
def test_a_module_loads_without(module: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {unwanted!r} if name in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert loaded.stdout.strip() == "[]"


def test_a_wrong_import_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "room.py"
    path.write_text("def f():\n    from service.server import serve\n    import worker.engine\n")
    assert {"service.server", "worker.engine"} <= set(_imports(path))
