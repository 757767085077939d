"""Processes that are killed or stopped: what is left, who notices, what comes back."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import pagecast
from pagecast.v1 import session_pb2
from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.e2e.processes import is_alive, wait_until, wait_until_gone
from tests.e2e.server import RunningServer, running_server
from tests.tiny_model import write_tiny_gguf

pytestmark = pytest.mark.e2e
PROMPT = "one two three four five six seven"
# So many that a turn runs for a second or more.
NUM_TOKENS = 600
# So many that it runs until something ends it.
ENDLESS = 16_000


@pytest.fixture
def sockets(short_folder: Path) -> Path:
    """Where the server puts the folder of its sockets."""
    return short_folder


@pytest.fixture(scope="session")
def long_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose turns don't end."""
    folder = tmp_path_factory.mktemp("long")
    return write_tiny_gguf(folder / "tiny.gguf", seed=1, ends=False, max_context_tokens=16_384)


@pytest.fixture
def pair(long_path: Path, tmp_path: Path, sockets: Path) -> Iterator[RunningServer]:
    """A server of two workers, whose turns take a while: on the slow kernels."""
    flags = ["--model", str(long_path), "--workers", "2", "--threads", "1", "--kernels", "reference"]
    with running_server(tmp_path, *flags, TMPDIR=str(sockets)) as server:
        yield server


class Background:
    """A turn that is read in a thread: its tokens as they come, and how it failed."""

    def __init__(self, session: pagecast.ClientSession, num_tokens: int = NUM_TOKENS) -> None:
        self.token_ids: list[int] = []
        self.error: pagecast.PagecastError | None = None
        self._turn = session.generate(PROMPT, max_tokens=num_tokens)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for chunk in self._turn:
                self.token_ids += chunk.token_ids
        except pagecast.PagecastError as caught:
            self.error = caught

    def cancel(self) -> None:
        self._turn.cancel()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_g03_a_killed_gateway_leaves_nothing(pair: RunningServer, sockets: Path) -> None:
    processes = [pair.supervisor_pid(), *pair.worker_pids()]
    assert len(processes) == 3
    assert len(list(sockets.iterdir())) == 1
    os.kill(processes[1], signal.SIGSTOP)
    pair.process.send_signal(signal.SIGKILL)
    pair.process.wait()
    wait_until_gone(processes, 2.0)
    assert list(sockets.iterdir()) == []


def test_a_killed_supervisor_ends_everything(pair: RunningServer, sockets: Path) -> None:
    supervisor, *workers = [pair.supervisor_pid(), *pair.worker_pids()]
    os.kill(workers[0], signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    wait_until_gone([pair.process.pid, supervisor, *workers], 2.0)
    assert pair.process.wait(5) == 1
    assert pair.events("gateway_failed")[0]["error"] == "the supervisor of the workers is gone"
    assert list(sockets.iterdir()) == []


def seconds_to_ends(server: RunningServer, since: datetime) -> float:
    """When the last turn was lost, by the gateway: this process has all tokens to read before it knows."""
    lost = [event for event in server.events("generation") if event["error_reason"] == "WORKER_LOST"]
    return (max(datetime.fromisoformat(event["ts"]) for event in lost) - since).total_seconds()


def test_a_supervisor_killed_in_a_drain_ends_the_streams_at_once(pair: RunningServer, sockets: Path) -> None:
    with pagecast.Client(pair.target) as client:
        streams = [Background(client.open_session("tiny"), ENDLESS) for _ in range(2)]
        wait_until(lambda: all(len(stream.token_ids) >= 3 for stream in streams), 10.0)
        supervisor, *workers = [pair.supervisor_pid(), *pair.worker_pids()]
        pair.process.send_signal(signal.SIGTERM)
        pair.wait_for_event("gateway_stopping")
        killed_at = datetime.now(UTC)
        os.kill(supervisor, signal.SIGKILL)
        for stream in streams:
            stream.join()
            assert isinstance(stream.error, pagecast.WorkerLost)
    wait_until_gone([pair.process.pid, supervisor, *workers], 2.0)
    assert pair.process.wait(5) == 1
    assert seconds_to_ends(pair, killed_at) < 1.0
    assert pair.events("gateway_failed")[0]["error"] == "the supervisor of the workers is gone"
    assert list(sockets.iterdir()) == []


def test_a_worker_killed_in_the_middle_of_a_stream(pair: RunningServer) -> None:
    with pagecast.Client(pair.target) as client:
        with client.open_session("tiny") as session:
            expected = list(session.generate(PROMPT, max_tokens=NUM_TOKENS).wait().token_ids)
        # One on each worker.
        sessions = [client.open_session("tiny") for _ in range(2)]
        streams = [Background(session, ENDLESS) for session in sessions]
        wait_until(lambda: all(len(stream.token_ids) >= 3 for stream in streams), 10.0)
        pids = pair.worker_pids()
        killed_at = datetime.now(UTC)
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: any(stream.error for stream in streams), 10.0)
        (lost,) = [index for index in range(2) if streams[index].error is not None]
        assert isinstance(streams[lost].error, pagecast.WorkerLost)
        pair.wait_for_event("generation", error_reason="WORKER_LOST")
        assert seconds_to_ends(pair, killed_at) < 1.0
        wait_until(lambda: len(streams[1 - lost].token_ids) >= NUM_TOKENS, 30.0)
        assert streams[1 - lost].token_ids[:NUM_TOKENS] == expected
        streams[1 - lost].cancel()
        streams[1 - lost].join()

        with pytest.raises(pagecast.SessionFailed):
            sessions[lost].generate(PROMPT, max_tokens=1).wait()
        assert sessions[lost].get().state == session_pb2.SESSION_STATE_FAILED
        for _ in range(2):
            assert sessions[lost].close().state == session_pb2.SESSION_STATE_CLOSED
        assert sessions[1 - lost].get().state == session_pb2.SESSION_STATE_ACTIVE

        wait_until(lambda: len(pair.events("worker_connected")) == 3, 30.0)
        assert pids[0] not in pair.worker_pids()
        # The worker that is back has the fewest, and its tokens are the same.
        with client.open_session("tiny") as session:
            assert list(session.generate(PROMPT, max_tokens=NUM_TOKENS).wait().token_ids) == expected
    (lost_event,) = pair.events("worker_lost")
    assert (lost_event["pid"], lost_event["exit_code"]) == (pids[0], -signal.SIGKILL)
    (restart,) = pair.events("worker_restarting")
    assert (restart["index"], restart["pid"], restart["restart_in_s"]) == (lost_event["index"], pids[0], 0.1)


def test_opening_goes_on_while_a_worker_dies(pair: RunningServer) -> None:
    with pagecast.Client(pair.target) as client:
        os.kill(pair.worker_pids()[0], signal.SIGKILL)
        sessions = [client.open_session("tiny") for _ in range(4)]
        for session in sessions:
            assert len(session.generate(PROMPT, max_tokens=2).wait().token_ids) == 2


def test_g04_a_stream_that_runs_at_sigterm_ends_whole(pair: RunningServer) -> None:
    with pagecast.Client(pair.target) as client:
        stream = Background(client.open_session("tiny"))
        wait_until(lambda: len(stream.token_ids) >= 3, 10.0)
        pair.process.send_signal(signal.SIGTERM)
        pair.wait_for_event("gateway_stopping", num_turns=1)
        with pytest.raises(pagecast.Draining):
            client.open_session("tiny")
        stream.join()
        assert stream.error is None
        assert len(stream.token_ids) == NUM_TOKENS
    assert pair.process.wait(10) == 0


def test_g01_a_stopped_worker_is_noticed_and_replaced(tiny_path: Path, tmp_path: Path, sockets: Path) -> None:
    flags = ["--model", str(tiny_path), "--worker-timeout", "2"]
    with (
        running_server(tmp_path, *flags, TMPDIR=str(sockets)) as server,
        grpc.insecure_channel(server.target) as channel,
        pagecast.Client(server.target) as client,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="pagecast.v1.GenerationService"))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        session = client.open_session("tiny")
        (pid,) = server.worker_pids()
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert time.monotonic() - stopped_s < 5.0
        with pytest.raises(pagecast.NoWorker):
            client.open_session("tiny")
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        assert not is_alive(pid)
        watch.cancel()
        with pytest.raises(pagecast.SessionFailed):
            session.generate(PROMPT, max_tokens=1).wait()
        with client.open_session("tiny") as reopened:
            assert len(reopened.generate(PROMPT, max_tokens=2).wait().token_ids) == 2


def test_a_worker_refuses_whoever_has_no_token(pair: RunningServer, sockets: Path) -> None:
    (folder,) = sockets.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in folder.iterdir():
        with grpc.insecure_channel(f"unix:{path}") as channel:
            worker = worker_pb2_grpc.WorkerServiceStub(channel)
            calls = [
                lambda worker=worker, metadata=metadata: worker.GetWorkerInfo(
                    worker_pb2.GetWorkerInfoRequest(), timeout=5.0, metadata=metadata
                )
                for metadata in ((), (("pagecast-token", "0" * 32),))
            ]
            calls.append(
                lambda worker=worker: list(worker.StreamSteps(worker_pb2.StreamStepsRequest(), timeout=5.0))
            )
            for call in calls:
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
