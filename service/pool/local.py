"""Workers as processes of this machine, on Unix sockets in a folder that only this user can enter.

Knows the worker's command line and how to talk to the supervisor that runs it; does not know the worker's
protocol. Start the pool before gRPC starts its threads.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from structlog.typing import FilteringBoundLogger

from service.config import MAX_THREADS, ServeSettings, available_cpus, worker_environment
from service.errors import StartError
from service.pool import Incarnation, supervisor
from service.pool.placement import Placement, place_workers

# Of sockaddr_un, less the closing NUL.
MAX_SOCKET_PATH_BYTES = 107
_LONGEST_NAME = "99-9999999999.sock"
# The supervisor kills what outlasts the grace; it needs no more than this to say good-bye itself.
_SUPERVISOR_GRACE_S = 2.0


class LocalPool:
    """Workers behind a supervisor process; whoever starts the pool calls `stop`, on every path."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        orders: socket.socket,
        folder: Path,
        token: str,
        size: int,
        log: FilteringBoundLogger,
    ) -> None:
        self._process = process
        self._orders = orders
        self._folder = folder
        self._token = token
        self._log = log
        self._present: list[Incarnation | None] = [None] * size
        self._news: list[asyncio.Queue[Incarnation]] = [asyncio.Queue() for _ in range(size)]
        # Whether somebody waits for the next process of a place, and the end that is told then: one that
        # ends the gateway's start restarts nothing.
        self._is_awaited = [False] * size
        self._untold: list[dict[str, Any] | None] = [None] * size

    @classmethod
    def start(cls, settings: ServeSettings, log: FilteringBoundLogger) -> "LocalPool":
        """Start the supervisor and return at once; it starts the workers' processes meanwhile.

        Raises:
            StartError: It cannot be started, a worker's socket would have too long a path, or the workers
                can't be placed on the CPUs as the settings ask for.
        """
        placements = _placements(settings)
        folder = Path(tempfile.mkdtemp(prefix="pagecast-"))
        ours, theirs = socket.socketpair()
        try:
            if len(os.fsencode(folder / _LONGEST_NAME)) > MAX_SOCKET_PATH_BYTES:
                raise StartError(f"the folder for temporary files is too long for a socket: {folder}")
            token = secrets.token_hex(16)
            first = {
                "command": [*worker_command(settings), "--memory-share", repr(1 / len(placements))],
                "places": [
                    {"arguments": ["--threads", str(placement.num_threads)], "cpus": placement.cpus}
                    for placement in placements
                ],
                "token": token,
                "folder": str(folder),
            }
            # Before there is a supervisor: one whose gateway ends meanwhile knows the folder to remove.
            ours.sendall(json.dumps(first).encode() + b"\n")
            process = subprocess.Popen(
                # By its path and isolated: nothing of this package is imported there.
                [sys.executable, "-I", "-S", supervisor.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=worker_environment(),
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        except OSError as error:
            ours.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise StartError(f"cannot start the workers: {error}") from error
        except BaseException:
            ours.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return cls(process, ours, folder, token, len(placements), log)

    @property
    def size(self) -> int:
        """Number of places."""
        return len(self._present)

    @property
    def token(self) -> str:
        """What the workers ask for; drawn anew for each pool."""
        return self._token

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    async def next(self, index: int) -> Incarnation:
        """Wait for the next process in a place; one that could not be started has `error`."""
        self._is_awaited[index] = True
        self._tell_restart(index)
        try:
            return await self._news[index].get()
        finally:
            self._is_awaited[index] = False

    def kill(self, index: int, incarnation: Incarnation) -> None:
        """Send SIGKILL to a process, unless it has ended."""
        if incarnation.exit_code is None:
            self._order({"kill": index, "pid": incarnation.pid})

    async def watch(self) -> None:
        """Take in what the supervisor tells; return when it is gone, and the workers with it."""
        loop = asyncio.get_running_loop()
        received = b""
        with contextlib.suppress(OSError):
            while more := await loop.sock_recv(self._orders, 65_536):
                *lines, received = (received + more).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
        # Nobody tells their ends any more, and nobody need: the kernel killed those that were left.
        for index in range(self.size):
            self._end(index, -signal.SIGKILL)

    def stop(self, grace_s: float) -> None:
        """End workers and supervisor, by force after `grace_s`; remove the folder. Idempotent.

        A second call while the first one waits in another thread shortens the grace.
        """
        self._order({"stop": grace_s})
        try:
            self._process.wait(grace_s + _SUPERVISOR_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel kills the workers with it
            self._process.wait()
        self._orders.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _order(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone, and the workers with it
            self._orders.send(json.dumps(order).encode() + b"\n")

    def _take(self, event: dict[str, Any]) -> None:
        index: int = event["index"]
        match event["event"]:
            case "started":
                self._tell_restart(index)
                started = Incarnation(event["address"], event["pid"])
                self._present[index] = started
                self._news[index].put_nowait(started)
                self._log.info("worker_started", index=index, pid=started.pid)
            case "ended":
                self._end(index, event["exit_code"])
                self._untold[index] = {name: event[name] for name in ("pid", "exit_code", "restart_in_s")}
                if self._is_awaited[index]:
                    self._tell_restart(index)
            case "unstartable":
                self._tell_restart(index)
                self._news[index].put_nowait(Incarnation("", error=event["error"]))
                self._untold[index] = {name: event[name] for name in ("error", "restart_in_s")}

    def _tell_restart(self, index: int) -> None:
        fields, self._untold[index] = self._untold[index], None
        if fields is not None:
            self._log.warning("worker_restarting", index=index, **fields)

    def _end(self, index: int, exit_code: int) -> None:
        ended = self._present[index]
        if ended is not None and ended.exit_code is None:
            ended.exit_code = exit_code


def worker_command(settings: ServeSettings) -> list[str]:
    """Return the command line of a worker, but for what its place and its process add."""
    command = [
        sys.executable, "-m", "worker",
        "--model", settings.model,
        "--device", settings.device,
        "--kernels", settings.kernels,
        "--weights", settings.weights,
        "--activations", settings.activations,
        "--kv-dtype", settings.kv_dtype,
        "--decode-plan", settings.decode_plan,
        "--max-replan-sessions", str(settings.max_replan_sessions),
        "--log-level", settings.log_level,
    ]  # fmt: skip
    optional = {"--kv-blocks": settings.kv_blocks, "--max-step-tokens": settings.max_step_tokens}
    for flag, value in optional.items():
        if value is not None:
            command += [flag, str(value)]
    if settings.pin_threads:
        command.append("--pin-threads")
    return command


def _placements(settings: ServeSettings) -> list[Placement]:
    """Where the workers run. Raises StartError."""
    is_given = not settings.numa or "workers" in settings.model_fields_set
    return place_workers(
        available_cpus(),
        num_workers=settings.workers if is_given else None,
        threads=settings.threads,
        max_threads=MAX_THREADS,
        numa=settings.numa,
        pin_threads=settings.pin_threads,
    )
