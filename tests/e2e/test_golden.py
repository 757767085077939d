"""SmolLM2-135M through gateway and worker, against ids that another implementation computed."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pagecast
from tests.e2e.agreement import assert_ids_agree
from tests.e2e.server import running_server
from worker.model.weights.gguf import resolve_model_spec

pytestmark = [pytest.mark.e2e, pytest.mark.model]
MIB = 1 << 20
CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "smollm2-greedy.json").read_text()
)["cases"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pagecast.Client]:
    """Of a worker that computes as the other implementation did: in float32."""
    with (
        running_server(
            tmp_path_factory.mktemp("smollm2"),
            "--model",
            "smollm2-135m",
            "--activations",
            "float32",
            "--kv-dtype",
            "float32",
        ) as server,
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("flags", "activations", "min_margin"),
    [((), "int8", 0.5), (("--activations", "bfloat16"), "bfloat16", 0.2)],
    ids=["as it comes", "bfloat16"],
)
def test_a_worker_is_near_and_takes_little_beside_weights_and_pool(
    flags: tuple[str, ...], activations: str, min_margin: float, tmp_path: Path
) -> None:
    """In the numbers that users get: rounding may turn over a margin of some tenths."""
    case = max(CASES, key=lambda case: len(case["token_ids"]))
    with (
        running_server(tmp_path, "--model", "smollm2-135m", *flags) as server,
        pagecast.Client(server.target, timeout_s=60.0) as client,
    ):

        def generate(given: list[int], count: int) -> list[int]:
            with client.open_session("smollm2-135m") as session:
                return list(session.generate(given, max_tokens=count).wait().token_ids)

        golden, margins = case["token_ids"], case["top1_minus_top2"]
        assert_ids_agree(generate, case["prompt_ids"], golden, margins, min_margin=min_margin)
        (ready,) = server.events("worker_ready")
        status = Path(f"/proc/{ready['pid']}/status").read_text(encoding="utf-8")
    sizes = {
        name: int(text.split()[0]) * 1024 for name, text in re.findall(r"((?:Vm|Rss)\w+):\s*(.*)", status)
    }
    file_bytes = resolve_model_spec("smollm2-135m").stat().st_size
    assert ready["activations"] == activations
    assert ready["kv_bytes"] > 100 * MIB
    assert sizes["VmHWM"] <= file_bytes + ready["kv_bytes"] + 350 * MIB, sizes
    # Of the pool few pages were touched. How much of a library is mapped is the system's choice.
    assert sizes["RssAnon"] <= file_bytes + 350 * MIB, sizes
