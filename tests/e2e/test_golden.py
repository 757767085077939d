"""SmolLM2-135M through gateway and worker, against ids that another implementation computed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pagecast
from tests.e2e.agreement import assert_ids_agree
from tests.e2e.server import running_server

pytestmark = [pytest.mark.e2e, pytest.mark.model]
CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "smollm2-greedy.json").read_text()
)["cases"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pagecast.Client]:
    with (
        running_server(tmp_path_factory.mktemp("smollm2"), "--model", "smollm2-135m") as server,
        pagecast.Client(server.target, timeout_s=60.0) as client,
    ):
        yield client


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"])
def test_golden_ids(client: pagecast.Client, case: dict[str, Any]) -> None:
    golden = case["token_ids"]

    def generate(given: list[int], count: int) -> list[int]:
        with client.open_session("smollm2-135m") as session:
            # The prompt itself goes in as a chat message, so that the template is part of the test.
            is_first = len(given) == len(case["prompt_ids"])
            turn = session.generate(case["prompt"] if is_first else given, max_tokens=count).wait()
        if is_first:
            assert list(turn.input_token_ids) == case["prompt_ids"]
        return list(turn.token_ids)

    assert_ids_agree(generate, case["prompt_ids"], golden, case["top1_minus_top2"], min_margin=0.02)
