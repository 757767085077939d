"""The demo against a small real server: what it shows, and that unequal tokens fail it."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from bench import server_process
from bench.demo import FOLLOW_UP, PROMPT, main
from pagecast.v1 import session_pb2
from tests.client.fake_server import FakeServer


class Disagreeing(FakeServer):
    """Gives REPLAN sessions another last token."""

    def _turn(self, request: Any, context: Any) -> Iterator[Any]:
        replanned = self.state[request.session_id].decode_plan == session_pb2.PAGED_DECODE_PLAN_REPLAN
        for response in super()._turn(request, context):
            if replanned and response.chunk.first_token_index == request.stopping.max_tokens - 1:
                for token in response.chunk.tokens:
                    token.id += 1
            yield response


def demo(server: FakeServer) -> Any:
    return CliRunner().invoke(main, ["--target", server.target, "--max-tokens", "10"])


def test_equal_tokens_pass_and_the_figures_are_shown() -> None:
    with FakeServer() as server:
        result = demo(server)
    assert result.exit_code == 0, result.output
    assert "tokens equal: yes" in result.stdout
    for text in (PROMPT[:10], FOLLOW_UP[:10]):
        assert f"\n{text}\n" in result.stdout
    cached = len(PROMPT) + 10 - 1
    assert f"of the session's earlier ones {cached} were cached" in " ".join(result.stdout.split())
    assert all(state.state == session_pb2.SESSION_STATE_CLOSED for state in server.state.values())
    plans = [state.decode_plan for state in server.state.values()]
    assert plans == [session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE, session_pb2.PAGED_DECODE_PLAN_REPLAN]


def test_one_other_token_fails_it() -> None:
    with Disagreeing() as server:
        result = demo(server)
    assert result.exit_code == 1
    assert "tokens equal: no" in result.stdout


def test_a_failing_call_is_one_line() -> None:
    with FakeServer() as server:
        server.models = []
        result = demo(server)
    assert (result.exit_code, result.stderr) == (1, "error: NO_WORKER: no worker is there\n")


def fake_command(monkeypatch: pytest.MonkeyPatch, program: str) -> list[subprocess.Popen[bytes]]:
    """Lets the child be `program` in place of a server; gives the children started."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", program, *command[3:]], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


HEALTHY = """
import signal, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2_grpc
server = grpc.server(ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
assert server.add_insecure_port(sys.argv[3])
server.start()
signal.signal(signal.SIGTERM, lambda *_: server.stop(0))
server.wait_for_termination()
"""


def test_the_server_is_started_waited_for_and_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = fake_command(monkeypatch, HEALTHY)
    log = tmp_path / "run" / "demo.log"
    with server_process.running_server(log, Console(quiet=True)) as target:
        assert target.startswith("127.0.0.1:")
        assert started[0].poll() is None
    assert started[0].returncode == 0
    with pytest.raises(KeyError), server_process.running_server(log, Console(quiet=True)):
        raise KeyError("body")
    assert started[1].returncode == 0


def test_a_server_that_ends_early_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_command(monkeypatch, "import sys; print('why it ended'); sys.exit(7)")
    log = tmp_path / "demo.log"
    before = time.monotonic()
    with (
        pytest.raises(server_process.ServerError, match="exit code 7"),
        server_process.running_server(log, Console(quiet=True)),
    ):
        pass
    assert time.monotonic() - before < 10
    assert log.read_text() == "why it ended\n"


def test_a_server_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deaf = HEALTHY.replace("lambda *_: server.stop(0)", "signal.SIG_IGN")
    started = fake_command(monkeypatch, deaf)
    monkeypatch.setattr(server_process, "STOP_TIMEOUT_S", 0.2)
    with (
        pytest.raises(server_process.ServerError, match=f"exit code {-signal.SIGKILL}"),
        server_process.running_server(tmp_path / "demo.log", Console(quiet=True)),
    ):
        pass
    assert started[0].returncode == -signal.SIGKILL
