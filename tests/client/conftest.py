from collections.abc import Iterator

import pytest

from tests.client.fake_server import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server
