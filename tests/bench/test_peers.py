"""`bench peers` over children that compute nothing: turns, samples, judgements, failures."""

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench import peers_report
from bench.peer_cases import GROUPS, LLAMA_CPP, OPENVINO
from bench.peer_engines import EngineFailed, SpokenEngine
from bench.peers import OURS, Comparison, Engines, Places, compare
from bench.peers_report import line_of
from tests.bench.peer_fakes import GROUP, Fakes


def test_engines_take_turns_and_the_first_round_is_nobodys(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, llama=("5",), openvino=("5",))
    told = []
    comparison = compare([GROUP], (LLAMA_CPP, OPENVINO), 2, fakes, lambda found: told.append(line_of(found)))
    assert told == [
        "Q4_1-int8, 4 sessions, context 128: 2.50 ms; 1.25 x floor, 2.00 x llama.cpp, 2.00 x OpenVINO GenAI",
        "Q4_1-int8, first token, prompt of 2,048: 2.50 ms; 2.00 x llama.cpp, 2.00 x OpenVINO GenAI",
    ]
    decoded = [line.split()[0] for line in fakes.journal() if line.endswith("decode 128")]
    ours, theirs, other = OURS, "llama.cpp", "OpenVINO"
    assert decoded == [ours, theirs, other, theirs, other, ours, other, ours, theirs]
    decode, first = comparison.found
    assert decode.ours_ms == (2.5, 2.5)
    assert decode.theirs_ms == {LLAMA_CPP: (5.0, 5.0), OPENVINO: (5.0, 5.0)}
    # Two rounds of three samples each are fewer than one of three: a dear case is asked once.
    assert first.ours_ms == (2.5,) * 3
    assert decode.floor_ms == pytest.approx(2.0)
    assert first.floor_ms is None
    assert [each.passed for found in comparison.found for each in found.promises()] == [
        True,  # 2.5 ms over a floor of 2
        True,
        False,  # twice as fast as OpenVINO, not three times
        True,
    ]
    assert comparison.versions == {LLAMA_CPP: "llama.cpp 1.0", OPENVINO: "OpenVINO 1.0"}
    assert comparison.bandwidths == (1e9,) * 3
    assert all(engine._process.poll() is not None for engine in fakes.started)


def test_who_cannot_run_is_told_and_the_others_do(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, openvino=("5", "128"))
    comparison = compare([GROUP], (LLAMA_CPP, OPENVINO), 1, fakes)
    decode, first = comparison.found
    assert comparison.missing == {"Q4_1-int8, llama.cpp": "is not there"}
    assert decode.failed == {OPENVINO: "OpenVINO GenAI: too long"}
    assert (decode.theirs_ms, list(first.theirs_ms)) == ({}, [OPENVINO])
    assert [promise.passed for promise in decode.promises()] == [True]


def test_a_peer_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, llama=("5", "-1", "128"))
    decode, first = compare([GROUP], (LLAMA_CPP,), 1, fakes).found
    for found in (decode, first):
        assert (
            found.failed[LLAMA_CPP] == f"llama.cpp: ended with exit code 3; see {tmp_path / 'llama.cpp.log'}"
        )


def test_without_ours_there_is_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="Pagecast: too long"):
        compare([GROUP], (), 1, Fakes(tmp_path, ours=("1", "128")))


def test_a_group_without_our_file_is_left_out_and_the_others_run(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, llama=("5",))
    fakes.without_file = {"Q4_0"}
    groups = [replace(GROUP, weights="Q4_0"), GROUP]
    comparison = compare(groups, (LLAMA_CPP,), 1, fakes)
    assert [found.group.name for found in comparison.found] == ["Q4_1-int8"] * 2
    assert comparison.missing == {"Q4_0-int8": "Q4_0.gguf is not there"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SpokenEngine]:
    started = Fakes(tmp_path)._start("one", ("1.5",))
    yield started
    started.close()


def test_who_waits_is_stopped(engine: SpokenEngine) -> None:
    def state() -> str:
        return Path(f"/proc/{engine._process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def is_stopped() -> bool:
        deadline = time.monotonic() + 5.0
        while state() != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        return state() == "T"

    assert is_stopped()
    assert engine.run(GROUP.cases[0]) == [1.5]
    assert is_stopped()


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="x: /nowhere/python: No such file"):
        SpokenEngine("x", ["/nowhere/python"], tmp_path / "log")


def test_what_is_no_json_is_no_answer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('hello')"]
    with pytest.raises(EngineFailed, match="x: answered 'hello', which is no JSON"):
        SpokenEngine("x", command, tmp_path / "log")


def test_places_that_are_empty_are_named(tmp_path: Path) -> None:
    places = Places(tmp_path, tmp_path / "ours.gguf")
    places.model.touch()
    engines = Engines(places, 2, "auto", tmp_path / "logs")
    for peer, missing in (
        (LLAMA_CPP, "llama.cpp/llama-bench"),
        (OPENVINO, "openvino/bin/python"),
    ):
        with pytest.raises(EngineFailed, match=f"{peer}: {tmp_path}/{missing} is not there"):
            engines.peer(peer, GROUPS[0])
    with pytest.raises(EngineFailed, match=f"Pagecast: {tmp_path}/Q8_0.gguf is not there"):
        engines.ours(GROUPS[-1])
    assert engines.absent(GROUPS[-1]) == f"{tmp_path}/Q8_0.gguf is not there"
    assert engines.absent(GROUPS[0]) is None


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    fakes = Fakes(tmp_path, llama=("5",), openvino=("5", "2048"))
    return compare([GROUP], (LLAMA_CPP, OPENVINO), 1, fakes)


def test_the_table_judges(comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers_report.report(comparison, threads=2, rounds=1, check=False, as_json=False)
    assert not re.search("PASS|FAIL|set-up", capsys.readouterr().out)
    assert not peers_report.report(comparison, threads=2, rounds=1, check=True, as_json=False)
    said = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in said.splitlines()]
    assert "Q4_1-int8 4 sessions, context 128 floor 2.50 2.00 1.25 at most 1.4 met" in rows
    assert "Q4_1-int8 4 sessions, context 128 llama.cpp 2.50 5.00 2.00 1.5 x met" in rows
    assert "Q4_1-int8 4 sessions, context 128 OpenVINO GenAI 2.50 5.00 2.00 3.0 x NOT MET" in rows
    assert any("OpenVINO GenAI: too long" in row for row in rows)
    assert "FAIL Q4_1-int8, 4 sessions, context 128: 2.00 x OpenVINO GenAI, at least 3.0" in rows


def test_one_json_object_tells_all(comparison: Comparison, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    peers_report.report(comparison, threads=2, rounds=1, check=False, as_json=True)
    found = json.loads(capfdbinary.readouterr().out)
    decode, first = found["cases"]
    assert decode["ratios"] == {LLAMA_CPP: 2.0, OPENVINO: 2.0}
    assert [promise["passed"] for promise in decode["promises"]] == [True, True, False]
    assert first["failed"] == {OPENVINO: "OpenVINO GenAI: too long"}
    assert (found["threads"], found["rounds"], found["missing"]) == (2, 1, {})
    assert "checks" not in found
    peers_report.report(comparison, threads=2, rounds=1, check=True, as_json=True)
    checks = json.loads(capfdbinary.readouterr().out)["checks"]
    assert checks == [promise for case in (decode, first) for promise in case["promises"]]


def test_ours_alone_is_shown_and_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = Fakes(tmp_path)
    fakes.without_file = {"Q8_0"}
    told: list[str] = []
    groups = [GROUP, replace(GROUP, weights="Q8_0")]
    alone = compare(groups, (LLAMA_CPP, OPENVINO), 1, fakes, lambda found: told.append(line_of(found)))
    assert told[1] == "Q4_1-int8, first token, prompt of 2,048: 2.50 ms"
    assert peers_report.report(alone, threads=2, rounds=1, check=False, as_json=False)
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "Q4_1-int8 first token, prompt of 2,048 nobody 2.50" in rows
    assert rows[-4:] == [
        "not compared: Q8_0-int8: Q8_0.gguf is not there",
        "not compared: Q4_1-int8, llama.cpp: is not there",
        "not compared: Q4_1-int8, OpenVINO GenAI: is not there",
        "run `pagecast bench peers --set-up`",
    ]
    assert not peers_report.report(alone, threads=2, rounds=1, check=True, as_json=False)
    assert "FAIL nothing was compared" in capsys.readouterr().out


def test_no_group_at_all_is_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = Fakes(tmp_path)
    fakes.without_file = {"Q4_1"}
    nothing = compare([GROUP], (LLAMA_CPP,), 1, fakes)
    assert not peers_report.report(nothing, threads=2, rounds=1, check=True, as_json=False)
    said = capsys.readouterr().out
    assert "FAIL nothing was compared" in said
    assert "GB/s" not in said
