"""Servers that end-to-end tests share; each is started once, when the first test asks for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import pagecast
from tests.e2e.calls import CONTEXT, Api
from tests.e2e.rig import BROKEN_ID, Rig, running_rig
from tests.e2e.server import RunningServer, running_server
from tests.tiny_model import CHATML, write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights, whose greedy turns go on to their limit."""
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf", seed=1, ends=False, max_context_tokens=CONTEXT
    )


@pytest.fixture(scope="session")
def tiny_server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the small model, on the kernels that users get."""
    with running_server(tmp_path_factory.mktemp("tiny"), "--model", str(tiny_path)) as server:
        yield server


@pytest.fixture
def client(tiny_server: RunningServer) -> Iterator[pagecast.Client]:
    """A client of `tiny_server`."""
    with pagecast.Client(tiny_server.target) as client:
        yield client


@pytest.fixture(scope="session")
def rig_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a padded vocabulary, whose template writes the BOS that its tokenizer adds too."""
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "plain.gguf",
        seed=1,
        ends=False,
        max_context_tokens=CONTEXT,
        padded_vocab=7,
        add_bos=True,
        chat_template="{{ bos_token }}" + CHATML,
    )


@pytest.fixture(scope="session")
def rig(rig_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Workers that tests can ask: `plain`, the same model in other settings, and a broken one.

    `tight` has a pool of 32 blocks, `narrow` runs one turn at a time in chunks of 7 tokens and takes one
    session in REPLAN, and `broken` has an embedding (`BROKEN_ID`) that is NaN.
    """
    folder = tmp_path_factory.mktemp("rig")
    tight, narrow = folder / "tight.gguf", folder / "narrow.gguf"
    for path in (tight, narrow):
        path.symlink_to(rig_path)
    broken = write_tiny_gguf(
        folder / "broken.gguf", seed=1, ends=False, max_context_tokens=CONTEXT, nan_token=BROKEN_ID
    )
    models = {
        rig_path: (),
        tight: ("--kv-blocks", "32"),
        narrow: (
            *("--kv-blocks", "1024", "--max-step-tokens", "7", "--max-step-rows", "1"),
            *("--max-replan-sessions", "1"),
        ),
        broken: ("--kv-blocks", "1024"),
    }
    with running_rig(folder, models) as running:
        yield running


@pytest.fixture
def api(rig: Rig) -> Api:
    """Raw stubs; sessions are opened on `plain`."""
    return rig.api("plain")
