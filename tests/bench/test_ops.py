"""`bench ops` on a tiny model: every launch is in one line, and work is that of the model's sizes."""

import json

import pytest

from tests.bench.conftest import Run

pytest.importorskip("pagecast_native")

from bench.loading import Bench
from worker.plan.decode_session import step_program
from worker.plan.program import Capacity

# Activations stay "auto", and the report says what became of it.
FLOAT32 = ("--weights", "float32", "--kv-dtype", "float32", "--runs", "3")


def profile(bench: Run, *arguments: str) -> dict[str, dict[str, object]]:
    result = bench("ops", *FLOAT32, *arguments, "--json", kernels="native")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["weights"], found["activations"], found["kv_dtype"]) == ("float32", "float32", "float32")
    assert found["bandwidth"] > 0
    assert found["outside_us"] == found["step_us"] - found["kernel_us"]
    assert 0 < found["kernel_us"] < found["step_us"]
    times = [each["us"] for each in found["operators"]]
    assert times == sorted(times, reverse=True)
    assert sum(times) == pytest.approx(found["kernel_us"], rel=0.5)
    return {each["name"]: each for each in found["operators"]}


def test_a_step_of_decoding_sessions_and_a_prompt(bench: Run, small_reader: None, tiny_path) -> None:
    found = profile(bench, "--sessions", "2", "--context", "40", "--prefill", "7")
    tiny = Bench.load(str(tiny_path), kernels="native", num_threads=1, weights="float32", kv_dtype="float32")
    config = tiny.llama.config
    program = step_program(tiny.llama, tiny.pool(1), Capacity(9, 3, 1))
    assert sum(each["launches"] for each in found.values()) == len(program.launches)
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_size
    qkv = found[f"linear {rows} x {config.hidden_size} f32"]
    assert qkv["launches"] == config.num_layers
    assert qkv["work"]["macs"] == config.num_layers * rows * config.hidden_size * 9
    assert qkv["work"]["read_bytes"] == config.num_layers * rows * config.hidden_size * 4
    # Only the last token of each row has logits.
    head = found[f"linear {config.vocab_size} x {config.hidden_size} f32"]
    assert head["work"]["macs"] == config.vocab_size * config.hidden_size * 3
    attention = found["paged_attention"]["work"]
    width = config.num_heads * config.head_size
    assert attention["macs"] == 2 * config.num_layers * width * (2 * 40 + 7 * 8 / 2)
    of_token = 2 * config.num_layers * config.num_kv_heads * config.head_size * 4
    assert attention["read_bytes"] == of_token * (2 * 40 + 7)
    assert found["rms_norm"]["work"] == {"read_bytes": 0.0, "macs": 0.0}


def test_the_table_says_the_same(bench: Run, small_reader: None) -> None:
    result = bench("ops", *FLOAT32, kernels="native")
    assert result.exit_code == 0, result.output
    assert "1 decoding at 128, 0 tokens of a prompt" in " ".join(result.stdout.split())
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(row.startswith("outside kernels ") for row in rows)
    (step,) = (row for row in rows if row.startswith("step "))
    assert len(step.split()) == 4
    label, gb_per_s = rows[-2 if not rows[-1] else -1].rsplit(" ", 1)
    assert (label, float(gb_per_s) > 0) == ("reading alone", True)


@pytest.mark.parametrize(
    ("arguments", "kernels", "message"),
    [
        ((), "reference", "operators are timed on native kernels, these are reference"),
        (("--sessions", "0"), "native", "--sessions, --prefill: there is nothing to run"),
        (("--context", "257"), "native", "--context, --prefill: 257 and 0 have to fit the model's 256"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    bench: Run, small_reader: None, arguments, kernels: str, message: str
) -> None:
    result = bench("ops", *arguments, kernels=kernels)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"error: {message}\n")
