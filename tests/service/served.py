"""`serve` as a process of a test, and the log that it writes."""

import asyncio
import json
import os
import sys
from typing import Any

SCRIPT = """
import json, sys
from service.config import ServeSettings
from service.server import serve
sys.exit(serve(ServeSettings(**json.loads(sys.argv[1]))))
"""


class Served:
    """A gateway process and the log lines that it wrote so far; all of them have to be JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def wait_for(self, event: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        while not self.lines or self.lines[-1]["event"] != event:
            line = await asyncio.wait_for(self.process.stderr.readline(), 30)
            assert line, f"ended without {event}: {self.lines}"
            self.lines.append(json.loads(line))
        return self.lines[-1]

    async def exit_code(self, timeout_s: float = 15) -> int:
        _, rest = await asyncio.wait_for(self.process.communicate(), timeout_s)
        self.lines += [json.loads(line) for line in rest.splitlines()]
        assert self.process.returncode is not None
        return self.process.returncode


async def start(script: str = SCRIPT, *arguments: str, **settings: Any) -> Served:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, json.dumps({"listen": "127.0.0.1:0", **settings}), *arguments,
        stderr=asyncio.subprocess.PIPE,
        # As an operator starts it, and not as these tests are.
        env={name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"},
    )  # fmt: skip
    return Served(process)


def story(served: Served) -> list[str]:
    """The events, one after the other."""
    return [line["event"] for line in served.lines]
