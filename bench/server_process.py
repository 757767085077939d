"""Runs `pagecast serve` as a child process within a `with` block. Knows no RPC but health."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.1


class ServerError(Exception):
    """The server did not start, or did not stop cleanly; the message says where its log is."""


class Server(NamedTuple):
    """A server that serves.

    Attributes:
        target: HOST:PORT.
        pid: Of the gateway; supervisor and workers are below it.
    """

    target: str
    pid: int


@contextlib.contextmanager
def running_server(log: Path, console: Console, model: str | None = None) -> Iterator[str]:
    """As `serving`, for who wants HOST:PORT alone and the server's default flags."""
    with serving(log, console, ["--model", model] if model else []) as server:
        yield server.target


@contextlib.contextmanager
def serving(log: Path, console: Console, flags: Sequence[str]) -> Iterator[Server]:
    """Start a server on a free loopback port, wait until it serves, yield it, stop it.

    Args:
        log: Takes the server's output; folders are made, an earlier log is replaced.
        console: Shows that the start is being waited for.
        flags: Of `pagecast serve`, but for `--listen`.

    Raises:
        ServerError: It ended or was not SERVING within START_TIMEOUT_S; or it did not exit with 0
            within STOP_TIMEOUT_S after SIGTERM.
    """
    target = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", "service.cli", "serve", "--listen", target, *flags]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # A group of its own: Ctrl-C reaches us alone, and we stop the server in order.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )
        try:
            started = time.monotonic()
            with console.status(f"starting pagecast serve on {target}, log in {log}"):
                _wait_until_serving(process, target, log)
            console.print(
                f"[dim]serving on {target} after {time.monotonic() - started:.1f} s, log in {log}[/]"
            )
            yield Server(target, process.pid)
        except BaseException:
            _stop(process)  # what went wrong first is what the caller has to hear of
            raise
        if (code := _stop(process)) != 0:
            raise ServerError(f"the server ended with exit code {code}; see {log}")


def _wait_until_serving(process: "subprocess.Popen[bytes]", target: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(target, options=[("grpc.max_reconnect_backoff_ms", 500)]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerError(f"the server ended with exit code {process.returncode}; see {log}")
            with contextlib.suppress(grpc.RpcError):
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(_POLL_S)
    raise ServerError(f"the server was not SERVING within {START_TIMEOUT_S:.0f} s; see {log}")


def _stop(process: "subprocess.Popen[bytes]") -> int:
    """SIGTERM, wait, and SIGKILL where that was not enough. Returns the exit code."""
    process.terminate()
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
