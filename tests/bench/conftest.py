"""A tiny model's file, and the benches run in process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench import floor
from bench.__main__ import main
from tests.tiny_model import write_tiny_gguf

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("bench") / "tiny.gguf", max_context_tokens=256)


@pytest.fixture
def bench(tiny_path: Path) -> Run:
    def run(command: str, *arguments: str, kernels: str = "reference") -> Result:
        setting = ["--model", str(tiny_path), "--threads", "1", "--kernels", kernels]
        return CliRunner().invoke(main, [command, *setting, *arguments])

    return run


@pytest.fixture
def small_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's bandwidth is read from a buffer of a megabyte."""
    monkeypatch.setattr(floor, "Reader", partial(floor.Reader, num_bytes=1 << 20))
