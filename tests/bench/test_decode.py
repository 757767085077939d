"""`bench decode` in process on a tiny model: what is run and counted, what it says. Speed is not judged."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from bench import decode_report
from bench.arms import Arm
from bench.decode import Decode, Decoder, Figures, Wish, mean_context
from bench.decode_report import floor_checks
from bench.floor import Reader, token_bytes, weight_bytes
from bench.loading import Bench
from tests.bench.conftest import Run
from worker.batch import DecodePlan

SHORT = ("--sessions", "1", "--sessions", "3", "--context", "20", "--context", "40", "--prompt", "33")
FEW = ("--tokens", "3", "--rounds", "2")


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> Bench:
    return Bench.load(str(tiny_path), kernels="reference", num_threads=1)


def test_one_json_object_tells_all(bench: Run, small_reader: None) -> None:
    result = bench("decode", *SHORT, *FEW, "--json", "--check")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["through"], found["rounds"], found["checks"]) == ("process", 2, [])
    assert found["note"] == "no promise is made for these weights and contexts"
    assert [(case["sessions"], case["context"]) for case in found["decode"]] == [(1, 20), (3, 20), (1, 40)]
    assert len(found["bandwidths"]) == 2
    bandwidth = statistics.median(found["bandwidths"])
    for case in found["decode"]:
        assert (len(case["step_ms"]), len(case["token_ms"])) == (2, 6)
        assert case["step_ms"][0] == pytest.approx(statistics.fmean(case["token_ms"][:3]))
        assert case["ms"] == statistics.median(case["step_ms"])
        assert case["tokens_per_s"] == case["sessions"] * 1e3 / case["ms"]
        assert case["floor_ms"] == pytest.approx(case["read_bytes"] / bandwidth * 1e3)
        assert case["times_floor"] == case["ms"] / case["floor_ms"]
    one, three, longer = (case["read_bytes"] - found["weight_bytes"] for case in found["decode"])
    assert three == pytest.approx(3 * one, abs=3)
    assert longer / one == pytest.approx(mean_context(40, 3) / mean_context(20, 3), rel=1e-3)
    assert [(case["prompt"], len(case["times_ms"])) for case in found["first_token"]] == [(33, 2)]


def test_the_table_says_the_same(bench: Run, small_reader: None) -> None:
    result = bench("decode", *SHORT, *FEW)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[:2] for row in rows if len(row) == 6 and row[0].isdigit()] == [
        ["1", "20"], ["3", "20"], ["1", "40"]
    ]  # fmt: skip
    assert any(row[:1] == ["33"] and len(row) == 3 for row in rows)
    assert "MB of weights, keys and values, over" in result.stdout


def test_sessions_draw_what_a_plan_draws_and_rounds_repeat_it(tiny: Bench) -> None:
    wish = Wish((3,), (20,), (), tokens=4, rounds=1)
    decoder = Decoder(tiny, wish)
    (sessions,) = decoder._decoding
    decoder.decode(0)
    first = [list(log) for log in sessions.logs]
    decoder.decode(0)
    assert sessions.logs == first
    arm = Arm(
        DecodePlan.REPLAN,
        tiny.runner(tiny.pool(6)),
        prompts=[log[:20] for log in first],
        block_tables=[(0, 1), (2, 3), (4, 5)],
        vocab_size=tiny.llama.config.vocab_size,
        max_step_tokens=7,
    )
    arm.prefill()
    arm.decode(4)
    assert arm.logs == first


def test_a_first_token_is_computed_anew_each_time(tiny: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(tiny, Wish((), (), (100,), tokens=1, rounds=1))
    sizes = []
    real = decoder._runner.launch
    monkeypatch.setattr(
        decoder._runner, "launch", lambda b, d: sizes.append(len(b.rows[0].token_ids)) or real(b, d)
    )
    assert [decoder.first_token(0) > 0 for _ in range(2)] == [True, True]
    assert sizes == [64, 36, 64, 36]


def test_what_a_step_reads(tiny: Bench) -> None:
    config = tiny.llama.config
    hidden, heads = config.hidden_size, config.num_heads + config.num_kv_heads
    of_layer = 2 * heads * config.head_size * hidden + 3 * config.intermediate_size * hidden
    # The table of embeddings is read by row, the head is a matrix of its own here.
    assert weight_bytes(tiny) == 4 * (config.num_layers * of_layer + config.vocab_size * hidden)
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_size * tiny.kv_dtype.itemsize
    assert token_bytes(tiny.pool(3)) == kv


def test_the_faster_way_of_reading_counts() -> None:
    reader = Reader(1, num_bytes=1 << 20)
    assert reader.read() > 0
    calls = []
    reader._ways = [lambda: sum(range(1 << 20)), lambda: calls.append(0)]
    fast = reader.read()
    reader._ways = reader._ways[:1]
    assert len(calls) == 1
    assert fast > 100 * reader.read()


def _figures(times_floor: float) -> Figures:
    steps = Decode(1, 128, (times_floor,), (times_floor,), floor_ms=1.0, read_bytes=1)
    return Figures((steps, replace(steps, sessions=4)), (), (1e9,), 1)


@pytest.mark.parametrize(
    ("kind", "times_floor", "passed"),
    [("int8", 1.39, [True]), ("int8", 1.41, [False]), ("float32", 1.13, [False]), (None, 9.0, [])],
)
def test_what_is_promised(kind, times_floor: float, passed: list[bool]) -> None:
    checks = floor_checks(_figures(times_floor), kind)
    assert [check.passed for check in checks] == passed
    assert all(f"1 session, context 128: {times_floor:.2f} x floor" in check.text for check in checks)


def test_a_promise_that_is_not_kept_fails(capsys: pytest.CaptureFixture[str]) -> None:
    found = _figures(2.0)
    for kind, kept in (("int8", False), (None, True)):
        checks = floor_checks(found, kind)
        assert decode_report.say("title", {}, found, checks, as_json=False) is kept
    said = capsys.readouterr().out
    assert "FAIL 1 session, context 128: 2.00 x floor, at most 1.4" in said
    assert said.count("no promise is made for these weights and contexts") == 1
    assert decode_report.say("title", {}, found, None, as_json=False)
    assert "promise" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sessions", "33"), "--sessions: 33 are over 32"),
        (
            ("--context", "240", "--tokens", "16"),
            "--context, --tokens: 240 + 16 + 1 are over the model's 256",
        ),
        (("--context", "2", "--prompt", "256"), "--prompt: 256 + 1 are over the model's 256"),
    ],
)
def test_what_cannot_be_measured_is_one_line(bench: Run, small_reader: None, arguments, message: str) -> None:
    result = bench("decode", *arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"error: {message}\n")
