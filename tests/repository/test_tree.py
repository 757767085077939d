"""What the repository's files may look like."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MAX_LINES = 300
# Loading code from data: model files are GGUF or safetensors, messages are protobuf.
FORBIDDEN = re.compile(
    r"\b(import pickle|from pickle|cPickle|cloudpickle|dill|marshal\.loads|torch\.load\b|shelve)"
)


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_files_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in _tracked("*.py", "*.cpp", "*.h")
        if (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_nothing_loads_code_from_data() -> None:
    me = Path(__file__)
    wrong = [
        str(path.relative_to(ROOT))
        for path in _tracked("*.py")
        if path != me and FORBIDDEN.search(path.read_text())
    ]
    assert wrong == []


@pytest.mark.parametrize("line", ["import pickle", "weights = torch.load(path)", "from pickle import loads"])
def test_what_is_forbidden_would_be_seen(line: str) -> None:
    assert FORBIDDEN.search(line)


def test_versions_are_pinned() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-]+==[^\s=]+", line) for line in lines)
    assert {"torch==2.13.0", "triton==3.7.1"} <= set(lines)


def test_compose_starts_a_gateway_and_a_worker() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert {"gateway", "worker"} <= services.keys()
    for service in services.values():
        assert (ROOT / service["build"]["dockerfile"]).is_file()
