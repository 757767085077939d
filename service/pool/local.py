"""Workers as child processes on Unix sockets in a folder that only this user can enter.

Knows the worker's command line; does not know its protocol. Spawn before gRPC starts its
threads: starting a process from a handler can deadlock.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from service.config import ServeSettings, worker_environment
from service.errors import StartError

# Of sockaddr_un, less the closing NUL.
MAX_SOCKET_PATH_BYTES = 107


class LocalPool:
    """Spawned workers; whoever makes the pool calls `stop`, on every path.

    Every worker holds the read end of one pipe and ends when the write end, kept here, closes:
    so none outlives the gateway, even one that is killed.
    """

    def __init__(self, processes: Mapping[str, subprocess.Popen[bytes]], folder: Path, lifeline: int) -> None:
        self._processes = dict(processes)
        self._folder = folder
        self._lifeline: int | None = lifeline

    @classmethod
    def spawn(cls, settings: ServeSettings) -> "LocalPool":
        """Start `settings.workers` processes and return at once; they load their model meanwhile.

        Raises:
            StartError: A process cannot be started, or the socket's path would be too long.
        """
        folder = Path(tempfile.mkdtemp(prefix="pagecast-"))
        read_end, lifeline = os.pipe()
        pool = cls({}, folder, lifeline)
        try:
            for index in range(settings.workers):
                path = folder / f"{index}.sock"
                if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
                    raise StartError(f"the folder for temporary files is too long for a socket: {folder}")
                address = f"unix:{path}"
                pool._processes[address] = subprocess.Popen(
                    worker_command(settings, address, read_end),
                    stdin=subprocess.DEVNULL,
                    env=worker_environment(),
                    pass_fds=(read_end,),
                    # A group of their own: a terminal's Ctrl-C reaches the gateway, which ends them in order.
                    process_group=0,
                )
        except OSError as error:
            pool.stop(0.0)
            raise StartError(f"cannot start a worker: {error}") from error
        except BaseException:
            pool.stop(0.0)
            raise
        finally:
            os.close(read_end)
        return pool

    @property
    def addresses(self) -> tuple[str, ...]:
        """GRPC target of each worker."""
        return tuple(self._processes)

    def exit_code(self, address: str) -> int | None:
        """Exit code of the process (negative: the signal that ended it), None while it runs."""
        return self._processes[address].poll()

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, wait up to `grace_s` in all, kill the rest, remove the folder. Idempotent."""
        deadline_s = time.monotonic() + grace_s
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)
        shutil.rmtree(self._folder, ignore_errors=True)


def worker_command(settings: ServeSettings, address: str, parent_fd: int) -> list[str]:
    """Return the command line of a worker that listens at `address` and watches `parent_fd`."""
    command = [
        sys.executable, "-m", "worker",
        "--model", settings.model,
        "--listen", address,
        "--kernels", settings.kernels,
        "--decode-plan", settings.decode_plan,
        "--threads", str(settings.threads or _threads_per_worker(settings.workers)),
        "--log-level", settings.log_level,
        "--parent-fd", str(parent_fd),
    ]  # fmt: skip
    optional = {"--kv-blocks": settings.kv_blocks, "--max-step-tokens": settings.max_step_tokens}
    for flag, value in optional.items():
        if value is not None:
            command += [flag, str(value)]
    return command


def _threads_per_worker(num_workers: int) -> int:
    """Share the CPUs out: workers that each took all of them would wait for one another."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)
