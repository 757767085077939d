"""`bench decode --through grpc`: one real server and client on a tiny model, and how times are taken."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import served
from bench.decode_report import say, served_checks
from bench.processes import children, command_line, cpu_s
from bench.served import Answer, Served, ServedDecode, _decode
from bench.served_client import _Window
from tests.bench.conftest import Run


@pytest.mark.e2e
def test_a_server_and_a_client_take_part(
    bench: Run, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "LOG", tmp_path / "serve.log")
    sizes = ("--sessions", "1", "--sessions", "3", "--context", "20", "--prompt", "10", "--tokens", "12")
    result = bench("decode", *sizes, "--rounds", "2", "--through", "grpc", "--json", "--check")
    assert result.stderr == "", result.stderr
    found = json.loads(result.stdout)
    assert found["through"] == "grpc"
    assert [(case["sessions"], case["context"]) for case in found["decode"]] == [(1, 20), (3, 20)]
    for case in found["decode"]:
        assert set(case["cpu"]) == {"gateway", "worker", "client"}
        assert all(0 <= share <= 3 for share in case["cpu"].values())
        assert case["cpu"]["worker"] > 0
        assert case["ratio"] == case["tokens_per_s"] / case["in_process_tokens_per_s"]
        assert case["added_ms"] == case["itl_ms"] - case["in_process_ms"]
    (first,) = found["first_token"]
    assert (first["prompt"], first["ms"] > first["in_process_ms"] > 0) == (10, True)
    added, memory = found["checks"]
    assert added["text"].startswith("1 session, context 20: ")
    assert result.exit_code == (not (added["passed"] and memory["passed"]))
    beside = found["worker_bytes"] - found["pool_bytes"] - found["file_bytes"]
    assert memory["text"].startswith(f"worker: {beside / 1e6:.0f} MB beside")
    # torch alone takes a hundred megabytes.
    assert found["worker_bytes"] > 100e6 > found["pool_bytes"] > 0
    assert found["file_bytes"] == tiny_path.stat().st_size


class Clock:
    """A window whose time and CPU seconds are told by hand."""

    def __init__(self, num_sessions: int) -> None:
        self.at = 0.0
        self.window = _Window(num_sessions, {"worker": 1})
        self.window._now = lambda: (self.at, {"worker": self.at / 2, "client": 0.0})


def test_tokens_count_from_the_last_first_one_to_the_first_last_one() -> None:
    clock = Clock(2)
    for clock.at, tell in ((1.0, "first"), (2.0, "first"), (4.0, "last"), (9.0, "last")):
        getattr(clock.window, tell)()
    arrivals = [[(1.0, 1), (2.0, 1), (3.0, 2), (4.0, 1)], [(2.0, 1), (4.0, 1), (9.0, 7)]]
    assert clock.window.told(arrivals) == {"tokens_per_s": 2.0, "cpu": {"worker": 0.5, "client": 0.0}}


def test_a_session_that_ends_before_another_began_is_no_figure() -> None:
    clock = Clock(2)
    for tell in ("first", "last", "first"):
        getattr(clock.window, tell)()
    with pytest.raises(ValueError, match="a session ended before all had begun"):
        clock.window.told([[(1.0, 1)]])


def test_rounds_become_medians() -> None:
    answers = [Answer(rate, (2.0, rate), {"worker": rate}) for rate in (3.0, 100.0, 4.0)]
    found = _decode(4, 128, [[1.0, 3.0], [1.0, 1.0], [4.0, 4.0]], answers)
    assert (found.tokens_per_s, found.in_process_tokens_per_s) == (4.0, 4 * 1e3 / 2.0)
    assert (found.itl_ms, found.in_process_ms, found.cpu) == (3.0, 2.0, {"worker": 4.0})


def _served(sessions: int, ratio: float, added_ms: float) -> Served:
    one = ServedDecode(sessions, 128, 100 * ratio, 100.0, 5.0 + added_ms, 5.0, {})
    return Served((one, replace(one, sessions=4)), (), worker_bytes=900, pool_bytes=500, file_bytes=100)


@pytest.mark.parametrize(
    ("sessions", "ratio", "added_ms", "passed"),
    [(16, 0.84, 9.0, False), (16, 0.86, 9.0, True), (1, 0.1, 1.4, True), (1, 0.9, 1.6, False)],
)
def test_what_is_promised(sessions: int, ratio: float, added_ms: float, *, passed: bool) -> None:
    check, memory = served_checks(_served(sessions, ratio, added_ms))
    assert memory.passed
    assert check.passed is passed
    assert (f"{added_ms:.2f} ms added" if sessions == 1 else f"{ratio:.2f} of the tokens") in check.text


def test_the_table_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = _served(16, 0.9, 1.0)
    cpu = {"gateway": 0.1, "worker": 1.5, "client": 0.25}
    found = replace(found, decodes=tuple(replace(each, cpu=cpu) for each in found.decodes))
    assert say("title", {}, found, served_checks(found), as_json=False)
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "16 128 90 100 0.90 6.00 5.00 1.00 10% 150% 25%" in rows
    assert any("the weights' file has 0 MB" in row for row in rows)


@pytest.mark.parametrize(("worker_bytes", "passed"), [(350_000_600, True), (350_000_601, False)])
def test_what_a_worker_may_take(worker_bytes: int, *, passed: bool) -> None:
    found = Served((), (), worker_bytes=worker_bytes, pool_bytes=500, file_bytes=100)
    (check,) = served_checks(found)
    assert check.passed is passed


def test_a_process_and_what_is_below_it() -> None:
    import subprocess
    import sys

    # Some ticks of CPU time, by which it is counted.
    script = (
        "import subprocess, sys, time\n"
        "while time.process_time() < 0.1: pass\n"
        "subprocess.run([sys.executable, '-c', 'input()'])"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    try:
        while not (below := children(parent.pid)):
            pass
        while command_line(below[0])[1:] != ["-c", "input()"]:
            pass
        assert 0 < cpu_s(parent.pid) < 5
    finally:
        parent.communicate(b"\n")
    assert children(parent.pid) == []
