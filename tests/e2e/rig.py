"""A gateway over workers that tests started by hand, so that the workers themselves can be asked.

Knows processes and addresses; knows no case.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.e2e.calls import Api
from tests.e2e.processes import wait_until
from tests.e2e.server import RunningServer, running_server

# Whose embedding is NaN in the model `broken`; as a control token it is in no text.
BROKEN_ID = 1


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process.

    Attributes:
        stub: Its service; `info` asks it for blocks and steps.
        log_path: What it wrote.
    """

    stub: Any
    log_path: Path

    def info(self) -> worker_pb2.GetWorkerInfoResponse:
        answer: worker_pb2.GetWorkerInfoResponse = self.stub.GetWorkerInfo(
            worker_pb2.GetWorkerInfoRequest(), timeout=10.0
        )
        return answer

    @property
    def num_free(self) -> int:
        return self.info().num_free_kv_blocks

    def tokens(self, *session_ids: str) -> list[dict[str, Any]]:
        """The token events of these sessions so far, in the order in which they were drawn."""
        lines = map(json.loads, self.log_path.read_text().splitlines())
        return [line for line in lines if line["event"] == "token" and line.get("session_id") in session_ids]

    def wait_for_tokens(self, session_id: str, count: int) -> list[dict[str, Any]]:
        """The token events of a session once there are so many; the log is written behind the calls."""
        wait_until(lambda: len(self.tokens(session_id)) >= count, 10.0)
        return self.tokens(session_id)


@dataclass(frozen=True, slots=True)
class Rig:
    """One gateway and its workers, by the names of their models."""

    server: RunningServer
    channel: grpc.Channel
    workers: Mapping[str, Worker]

    def api(self, model: str) -> Api:
        return Api(self.channel, model)


@contextmanager
def running_rig(folder: Path, models: Mapping[Path, Sequence[str]]) -> Iterator[Rig]:
    """Run a worker for each model file with its flags, and a gateway over all of them.

    Args:
        folder: For sockets and logs.
        models: Flags by the file that the worker serves; a model is named after its file.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(_stop, processes)
        addresses = {path.stem: f"unix:{folder / path.stem}.sock" for path in models}
        logs = {path.stem: folder / f"{path.stem}.log" for path in models}
        for path, flags in models.items():
            command = [sys.executable, "-m", "worker", "--model", str(path), "--threads", "1"]
            log = stack.enter_context(logs[path.stem].open("wb"))
            processes.append(
                subprocess.Popen(
                    [*command, "--listen", addresses[path.stem], *flags],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
        workers = {}
        for name, address in addresses.items():
            channel = stack.enter_context(grpc.insecure_channel(address))
            workers[name] = Worker(worker_pb2_grpc.WorkerServiceStub(channel), logs[name])
        flags = [part for address in addresses.values() for part in ("--worker-address", address)]
        server = stack.enter_context(running_server(folder, *flags))
        channel = stack.enter_context(grpc.insecure_channel(server.target))
        yield Rig(server, channel, workers)


def _stop(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(20)
