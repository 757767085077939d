"""The process between gateway and workers: starts workers, again when they end, and ends them all.

A process of its own, since starting one from a process with gRPC's threads can deadlock. It runs as a
script of the standard library alone, so it is up in milliseconds and has nothing in it that could fail.

Knows command lines, pids and exit codes; does not know what a worker does or whether it serves. It talks
to the gateway over an inherited socket, one JSON object a line:

    gateway: {"command": […], "places": [{"arguments": […], "cpus": null}], "token": "…", …}    first
             {"kill": 0, "pid": 17}    SIGKILL, unless another process took that place meanwhile
             {"stop": 5.0}             SIGTERM to all, SIGKILL after so many seconds, and end
    here:    {"event": "started", "index": 0, "pid": 17, "address": "unix:…"}
             {"event": "ended", "index": 0, "pid": 17, "exit_code": -9, "restart_in_s": 0.1}
             {"event": "unstartable", "index": 0, "error": "…", "restart_in_s": 0.1}

A gateway that is gone, killed too, closes its end: workers then get SIGTERM, and SIGKILL `ORPHAN_GRACE_S`
later. A worker has a pipe whose first line is the gateway's token and whose end tells it that nobody
looks after it any more. One that is stopped could not notice: the kernel kills it with this process
(PR_SET_PDEATHSIG, which is about the thread that started it: the only one here).
"""

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
# A worker that lived so long starts again as if it had never failed.
STEADY_S = 30.0
ORPHAN_GRACE_S = 0.5
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class _Worker:
    """The place of one worker, and the process that is in it.

    Attributes:
        index: Of the place.
        arguments: Of its command line alone.
        cpus: The only ones that its processes run on. None: all.
        process: None between an end and the next start.
        lifeline: Write end of the process's pipe.
        path: Its socket.
        num_started: Processes so far; each gets a socket of its own.
        started_s: Monotonic time of the last start.
        backoff_s: What the next end waits for.
        start_at_s: When to start the next process, while there is none.
    """

    index: int
    arguments: Sequence[str] = ()
    cpus: Sequence[int] | None = None
    process: "subprocess.Popen[bytes] | None" = None
    lifeline: int = -1
    path: Path = Path()
    num_started: int = 0
    started_s: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    start_at_s: float = 0.0


class Supervisor:
    """Keeps a process of `command` running in each of `places` until it is told to stop.

    Args:
        gateway: Where events go and orders come from.
        command: Of a worker; its place's arguments, `--listen` and `--parent-fd` are added.
        places: Of workers, as the gateway tells them.
        token: First line of every lifeline.
        folder: Where the sockets are; removed at the end.
        received: Of the orders, what was read already.
    """

    def __init__(
        self,
        gateway: socket.socket,
        *,
        command: Sequence[str],
        places: Sequence[Mapping[str, Any]],
        token: str,
        folder: Path,
        received: bytes = b"",
    ) -> None:
        self._gateway = gateway
        self._command = list(command)
        self._token = token
        self._folder = folder
        self._workers = [_Worker(index, **place) for index, place in enumerate(places)]
        self._kill_at_s: float | None = None
        self._received = received
        self._begin = _beginning()

    def run(self, wake_fd: int) -> None:
        """Look after the workers until all have ended on order; `wake_fd` is readable after a signal."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._gateway, selectors.EVENT_READ)
            selector.register(wake_fd, selectors.EVENT_READ)
            try:
                self._obey()
                while True:
                    self._take_ended()
                    self._kill_overdue()
                    if self._is_over():
                        break
                    self._start_due()
                    for key, _ in selector.select(self._wait_s()):
                        if key.fd == wake_fd:
                            os.read(wake_fd, 4096)
                        elif not self._read_orders():
                            selector.unregister(self._gateway)
                            self._stop(ORPHAN_GRACE_S)
            finally:
                self._kill_at_s = 0.0
                self._kill_overdue()
                shutil.rmtree(self._folder, ignore_errors=True)

    def _is_over(self) -> bool:
        return self._kill_at_s is not None and all(worker.process is None for worker in self._workers)

    def _wait_s(self) -> float | None:
        """Seconds until something is due; None where only an event can bring something."""
        due = [worker.start_at_s for worker in self._workers if worker.process is None]
        if self._kill_at_s is not None:
            due = [self._kill_at_s]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _start_due(self) -> None:
        now_s = time.monotonic()
        for worker in self._workers:
            if self._kill_at_s is None and worker.process is None and worker.start_at_s <= now_s:
                self._start(worker)

    def _start(self, worker: _Worker) -> None:
        worker.num_started += 1
        worker.path = self._folder / f"{worker.index}-{worker.num_started}.sock"
        address = f"unix:{worker.path}"
        read_end, worker.lifeline = os.pipe()
        os.write(worker.lifeline, f"{self._token}\n".encode())
        worker.started_s = time.monotonic()
        try:
            worker.process = subprocess.Popen(
                [*self._command, *worker.arguments, "--listen", address, "--parent-fd", str(read_end)],
                stdin=subprocess.DEVNULL,
                pass_fds=(read_end,),
                # A group of its own: a terminal's Ctrl-C reaches the gateway, which ends all in order.
                process_group=0,
                preexec_fn=lambda: self._begin(worker.cpus),  # noqa: PLW1509  this process has one thread
            )
        except (OSError, subprocess.SubprocessError) as error:  # the latter: its CPUs can't be had
            failed = {"event": "unstartable", "index": worker.index, "error": str(error)}
            self._tell({**failed, "restart_in_s": self._leave(worker)})
        else:
            pid = worker.process.pid
            self._tell({"event": "started", "index": worker.index, "pid": pid, "address": address})
        finally:
            os.close(read_end)

    def _take_ended(self) -> None:
        for worker in self._workers:
            process = worker.process
            if process is None or process.poll() is None:
                continue
            ended = {"event": "ended", "index": worker.index, "pid": process.pid}
            ended |= {"exit_code": process.returncode, "restart_in_s": self._leave(worker)}
            self._tell(ended)

    def _leave(self, worker: _Worker) -> float:
        """Clear a place and say when it is taken again. Returns the wait in seconds."""
        now_s = time.monotonic()
        worker.process = None
        os.close(worker.lifeline)
        worker.path.unlink(missing_ok=True)
        if now_s - worker.started_s >= STEADY_S:
            worker.backoff_s = FIRST_BACKOFF_S
        restart_in_s = worker.backoff_s
        worker.backoff_s = min(2 * worker.backoff_s, MAX_BACKOFF_S)
        worker.start_at_s = now_s + restart_in_s
        return restart_in_s

    def _read_orders(self) -> bool:
        """Do what the gateway asks; False once it is gone."""
        try:
            received = self._gateway.recv(65_536)
        except OSError:
            return False
        self._received += received
        self._obey()
        return bool(received)

    def _obey(self) -> None:
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            order: dict[str, Any] = json.loads(line)
            if "stop" in order:
                self._stop(order["stop"])
            else:
                self._kill(order["kill"], order["pid"])

    def _kill(self, index: int, pid: int) -> None:
        process = self._workers[index].process
        if process is not None and process.pid == pid:
            process.kill()

    def _stop(self, grace_s: float) -> None:
        """Start no more; the shortest of several graces counts."""
        kill_at_s = time.monotonic() + grace_s
        if self._kill_at_s is None:
            for worker in self._workers:
                if worker.process is not None:
                    worker.process.terminate()
        self._kill_at_s = kill_at_s if self._kill_at_s is None else min(self._kill_at_s, kill_at_s)

    def _kill_overdue(self) -> None:
        if self._kill_at_s is None or time.monotonic() < self._kill_at_s:
            return
        for worker in self._workers:
            if worker.process is not None:
                worker.process.kill()
                worker.process.wait()
                self._leave(worker)

    def _tell(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the gateway is gone: reading says so
            self._gateway.sendall(json.dumps(event).encode() + b"\n")


def _beginning() -> Callable[[Sequence[int] | None], None]:
    """Return what a child calls with its CPUs before it runs its program: it ends when its parent does."""
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def begin(cpus: Sequence[int] | None) -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
        if cpus is not None:
            os.sched_setaffinity(0, cpus)

    return begin


def _read_first(gateway: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Return the gateway's first line, and what came with it of the orders that follow."""
    received = b""
    while b"\n" not in received:
        more = gateway.recv(65_536)
        if not more:
            raise SystemExit(1)
        received += more
    line, _, rest = received.partition(b"\n")
    return json.loads(line), rest


def main(fd: int) -> None:
    """Run over the socket that was inherited as `fd`."""
    # Only the gateway decides when to end. Handlers, since workers would inherit signals that are ignored.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    wake_fd, signal_fd = os.pipe()
    os.set_blocking(signal_fd, False)
    os.set_blocking(wake_fd, False)
    signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)
    with socket.socket(fileno=fd) as gateway:
        gateway.set_inheritable(False)
        first, rest = _read_first(gateway)
        supervisor = Supervisor(
            gateway,
            command=first["command"],
            places=first["places"],
            token=first["token"],
            folder=Path(first["folder"]),
            received=rest,
        )
        supervisor.run(wake_fd)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except Exception as error:  # noqa: BLE001  a bug; standard error is a log of JSON lines
        failure = {
            "event": "supervisor_failed",
            "level": "error",
            "error": f"{type(error).__name__}: {error}",
        }
        sys.stderr.write(json.dumps(failure) + "\n")
        sys.exit(1)
