"""The Python of the README and of docs/client.md runs as it stands, but for address and model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import RunningServer

ROOT = Path(__file__).parents[2]
BLOCKS = [
    (name, at, block)
    for name in ("README.md", "docs/client.md")
    for at, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL))
]

pytestmark = pytest.mark.e2e


def test_there_are_blocks() -> None:
    assert [name for name, at, _ in BLOCKS if at == 0] == ["README.md", "docs/client.md"]
    assert len(BLOCKS) > 5


@pytest.mark.parametrize(("name", "at", "block"), BLOCKS, ids=[f"{name}-{at}" for name, at, _ in BLOCKS])
def test_a_block_runs(tiny_server: RunningServer, name: str, at: int, block: str) -> None:
    assert "127.0.0.1:7070" in block
    assert "smollm2-135m" in block
    code = block.replace("127.0.0.1:7070", tiny_server.target).replace("smollm2-135m", "tiny")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-"],
        input=code.encode(),
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.strip()
