"""Settings of the test process itself, and a fixture that tests of any kind need."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# As in a worker: threads that wait must not spin while other tests' processes want the core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# An example may take as long as a busy machine lets it.
settings.register_profile("pagecast", deadline=None)
settings.load_profile("pagecast")

# Before gRPC is imported: its core would write lines of its own between the tests' dots.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# A job that a shell runs in the background starts with Ctrl-C ignored, and so would the processes that
# tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for sockets, whose paths have to be short: pytest's own may be too long for them."""
    with tempfile.TemporaryDirectory(prefix="pc-", dir="/tmp") as folder:
        yield Path(folder)
