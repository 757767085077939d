"""Servers that end-to-end tests share; each is started once, when the first test asks for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import pagecast
from tests.e2e.server import RunningServer, running_server
from tests.tiny_model import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights, whose greedy turns go on to their limit."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=1, ends=False)


@pytest.fixture(scope="session")
def tiny_server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the small model on the reference kernels."""
    with running_server(tmp_path_factory.mktemp("tiny"), "--model", str(tiny_path)) as server:
        yield server


@pytest.fixture
def client(tiny_server: RunningServer) -> Iterator[pagecast.Client]:
    """A client of `tiny_server`."""
    with pagecast.Client(tiny_server.target) as client:
        yield client
