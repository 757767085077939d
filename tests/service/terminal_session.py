"""A process that believes to be at a terminal: what it shows is read, keys are typed."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")
CTRL_C, CTRL_D = "\x03", "\x04"


class TerminalSession:
    """`pagecast` with these arguments at a terminal of its own, until the block ends.

    Attributes:
        process: The command.
        raw: All that came to the terminal.
    """

    def __init__(self, *arguments: str, home: Path) -> None:
        self._master, terminal = pty.openpty()
        # Line editing as it is without anybody's own settings.
        env = os.environ | {"TERM": "xterm", "HOME": str(home), "INPUTRC": os.devnull}
        command = [sys.executable, "-m", "service.cli", *arguments]
        self.process = subprocess.Popen(
            # Opening it makes it the new session's own terminal, whose Ctrl-C becomes SIGINT.
            ["sh", "-c", ': < "$0"; exec "$@"', os.ttyname(terminal), *command],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env=env,
        )
        os.close(terminal)
        self.raw = b""
        self._read = 0

    def type(self, keys: str) -> None:
        """Type keys."""
        os.write(self._master, keys.encode())

    def until(self, text: str, timeout_s: float = 15.0) -> str:
        """Wait until `text` is shown after what was waited for before; return what was shown up to it."""
        deadline_s = time.monotonic() + timeout_s
        while (end := self.shown.find(text, self._read)) < 0:
            if not self._more(deadline_s - time.monotonic()):
                raise AssertionError(f"{text!r} did not come; shown since: {self.shown[self._read :]!r}")
        start, self._read = self._read, end + len(text)
        return self.shown[start:end]

    def wait(self, timeout_s: float = 15.0) -> int:
        """Wait for the end; return the exit code."""
        deadline_s = time.monotonic() + timeout_s
        while self._more(deadline_s - time.monotonic()):
            pass
        return self.process.wait(max(0.1, deadline_s - time.monotonic()))

    @property
    def shown(self) -> str:
        """All that was shown, without escape sequences."""
        return _ESCAPES.sub(b"", self.raw).decode(errors="replace").replace("\r\n", "\n")

    def _more(self, timeout_s: float) -> bool:
        """Read what comes; False at the end or after the time."""
        if not select.select([self._master], [], [], max(0.0, timeout_s))[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how Linux tells that the other side is closed
            return False
        self.raw += data
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(5)
        os.close(self._master)
