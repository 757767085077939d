"""A real `pagecast serve` process for tests: started, waited for, watched, stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

START_TIMEOUT_S = 120.0


class RunningServer:
    """One gateway process with its workers.

    Attributes:
        process: The gateway.
        target: HOST:PORT that it serves on.
        log_path: What it and its workers wrote.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", target: str, log_path: Path) -> None:
        self.process = process
        self.target = target
        self.log_path = log_path

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of that name so far; every line of the log has to be JSON."""
        # What is behind the last newline is still being written.
        whole, _, _ = self.log_path.read_text().rpartition("\n")
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if line["event"] == name]

    def wait_for_event(self, name: str, **fields: object) -> dict[str, Any]:
        """The first event of that name and those fields; the log is written behind the calls."""
        for _ in range(100):
            for event in self.events(name):
                if fields.items() <= event.items():
                    return event
            time.sleep(0.05)
        raise AssertionError(f"no {name} event with {fields} in {self.log_path}")

    def supervisor_pid(self) -> int:
        """The only child of the gateway."""
        (pid,) = _children(self.process.pid)
        return pid

    def worker_pids(self) -> list[int]:
        """Children of the supervisor, the first started first."""
        return sorted(_children(self.supervisor_pid()))

    def stop(self) -> int:
        """SIGTERM, wait, exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=20)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@contextmanager
def running_server(folder: Path, *flags: str, **variables: str) -> Iterator[RunningServer]:
    """Run `pagecast serve` with these flags and variables on a free port until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{probe.getsockname()[1]}"
    log_path = folder / "serve.log"
    command = [sys.executable, "-m", "service.cli", "serve", "--listen", target, *flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **variables},
        )
    server = RunningServer(process, target, log_path)
    try:
        _wait_until_serving(server)
        yield server
    finally:
        if process.poll() is None:
            server.stop()


def _wait_until_serving(server: RunningServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(server.target, options=[("grpc.max_reconnect_backoff_ms", 200)]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline and server.process.poll() is None:
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            except grpc.RpcError:
                time.sleep(0.1)
                continue
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{server.log_path.read_text()}")
