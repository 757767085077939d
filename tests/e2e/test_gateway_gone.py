"""A gateway over a worker of somebody else's that is killed: the worker gives its sessions up."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

import pagecast
from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.e2e.processes import wait_until
from tests.e2e.server import running_server
from tests.tiny_model import write_tiny_gguf

pytestmark = pytest.mark.e2e
# A worker as it is, but for how long it waits.
SCRIPT = """
import sys
from worker import owners
from worker.__main__ import main
owners.GONE_AFTER_S = 1.0
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def running_worker(model: Path, address: str, log_path: Path) -> Iterator[None]:
    flags = ["--model", str(model), "--threads", "1", "--kv-blocks", "2048", "--listen", address]
    with log_path.open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, *flags], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def test_a_killed_gateway_leaves_nothing_in_a_worker_that_others_use_too(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, ends=False, max_context_tokens=16_384)
    address, log_path = f"unix:{tmp_path}/worker.sock", tmp_path / "worker.log"
    folders = [tmp_path / "killed", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()

    def gone() -> list[dict[str, object]]:
        lines = [json.loads(line) for line in log_path.read_text().splitlines()]
        return [line for line in lines if line["event"] == "gateway_gone"]

    with (
        running_worker(model, address, log_path),
        running_server(folders[0], "--worker-address", address) as killed,
        running_server(folders[1], "--worker-address", address) as other,
        pagecast.Client(killed.target) as lost,
        pagecast.Client(other.target) as client,
        grpc.insecure_channel(address) as channel,
    ):
        kept = client.open_session("tiny")
        kept.generate("one two", max_tokens=2).wait()
        sessions = [lost.open_session("tiny") for _ in range(3)]
        turn = sessions[0].generate("one two", max_tokens=16_000)
        next(iter(turn))
        running = kept.generate(" three", max_tokens=16_000)
        next(iter(running))
        killed.process.kill()
        killed.process.wait()
        wait_until(lambda: bool(gone()), 10.0)
        assert [(event["num_sessions"], event["level"]) for event in gone()] == [(3, "warning")]
        next(iter(running))
        running.cancel()
        kept.close()
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        info = worker.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=5.0)
        assert info.num_free_kv_blocks == 2048
        # Nor is it disturbed by a gateway that left in order, without a session.
        with client.open_session("tiny") as session:
            assert len(session.generate("one", max_tokens=2).wait().token_ids) == 2
