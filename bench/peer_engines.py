"""Engines that `pagecast bench peers` asks in turn: children that answer, and llama.cpp's own two benches.

Knows processes and their answers; knows no target and no figure of ours.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from bench.peer_cases import Case

STOP_TIMEOUT_S = 10.0


class EngineFailed(Exception):
    """An engine ended, or could not do a case; the message says which and why."""


class Engine(Protocol):
    """What runs cases, alone while it does."""

    @property
    def name(self) -> str:
        """As in the table."""

    @property
    def version(self) -> str:
        """Of the engine's software."""

    def run(self, case: Case) -> list[float]:
        """Times in ms, `case.repeats` of them: a step of all sessions, or a first token.

        Raises:
            EngineFailed: It did not.
        """

    def close(self) -> None:
        """Ends it."""


class SpokenEngine:
    """A child that loads once and answers cases, one JSON object a line; `peer_driver` tells the language.

    Between cases it is stopped (SIGSTOP): a pool of threads that spins while it waits would take the time of
    whoever runs.

    Args:
        name: As in the table.
        command: What to run.
        log: Takes what the child writes to standard error.
        environment: Of the child; None: ours.

    Raises:
        EngineFailed: The child ended before it was ready.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = log
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            errors = log.open("wb")
        except OSError as error:
            raise EngineFailed(f"{name}: {log}: {error.strerror}") from error
        try:
            with errors:
                # A group of its own: what the engine starts stops with it, and Ctrl-C reaches us alone.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=None if environment is None else dict(environment),
                    process_group=0,
                    text=True,
                )
        except OSError as error:
            raise EngineFailed(f"{name}: {command[0]}: {error.strerror}") from error
        try:
            self.version = str(self._read()["ready"])
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, case: Case) -> list[float]:
        """See `Engine`."""
        wanted = asdict(case)
        names = ("what", "sessions", "context", "tokens", "repeats")
        found = [float(ms) for ms in self.ask({name: wanted[name] for name in names})["ms"]]
        if len(found) != case.repeats:
            raise EngineFailed(f"{self.name}: {len(found)} samples in place of {case.repeats}")
        return found

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Asks anything of the child's language; raises EngineFailed where the answer is an error."""
        self._signal(signal.SIGCONT)
        try:
            if self._process.stdin is None:
                raise EngineFailed(f"{self.name}: has no input")
            try:
                self._process.stdin.write(json.dumps(question) + "\n")
                self._process.stdin.flush()
            except OSError as error:
                raise self._ended() from error
            return self._read()
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends the child and what it started."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not sent to it is lost with it
                    pipe.close()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise self._ended()
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise EngineFailed(f"{self.name}: answered {line.strip()!r}, which is no JSON") from error
        if not isinstance(answer, dict) or "error" in answer:
            told = answer["error"] if isinstance(answer, dict) else line.strip()
            raise EngineFailed(f"{self.name}: {told}")
        return answer

    def _ended(self) -> EngineFailed:
        return EngineFailed(f"{self.name}: ended with exit code {self._process.wait()}; see {self._log}")

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


class LlamaCpp:
    """llama.cpp's `llama-bench` and, for several sessions, `llama-batched-bench`: a process for each case.

    Both warm up before they measure, and neither counts loading. llama-bench keeps a computed prompt from
    repeat to repeat. Flash attention is tried on and off when a case comes first; what is faster stays.

    Args:
        folder: Where the two programs are.
        model: GGUF file.
        threads: For all of it.

    Raises:
        EngineFailed: A program is not there.
    """

    name = "llama.cpp"

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        self._bench, self._batched = folder / "llama-bench", folder / "llama-batched-bench"
        for program in (self._bench, self._batched):
            if not program.is_file():
                raise EngineFailed(f"{self.name}: {program} is not there")
        self._common = ("-m", str(model), "-t", str(threads))
        self._flash: dict[str, str] = {}
        self.version = "unknown"

    def run(self, case: Case) -> list[float]:
        """See `Engine`. The first run of a case is made twice, and gives the faster one's times."""
        if case.name in self._flash:
            return self._run(case, self._flash[case.name])
        found = {flash: self._run(case, flash) for flash in ("on", "off")}
        best = min(found, key=lambda flash: min(found[flash]))
        self._flash[case.name] = best
        return found[best]

    def close(self) -> None:
        """See `Engine`; nothing is held."""

    def _run(self, case: Case, flash: str) -> list[float]:
        if case.sessions > 1:
            return self._batch(case, flash)
        if case.what == "decode":
            how = ["-p", "0", "-n", str(case.tokens), "-d", str(case.context)]
        else:
            how = ["-p", str(case.context), "-n", "0"]
        command = [*self._command(self._bench, flash), *how, "-r", str(case.repeats), "-o", "json"]
        (found,) = json.loads(self._output(command))
        self.version = str(found["build_commit"])
        return [ns / 1e6 / case.tokens for ns in found["samples_ns"]]

    def _batch(self, case: Case, flash: str) -> list[float]:
        room = case.sessions * (case.context + case.tokens)
        sizes = {"-npp": case.context, "-ntg": case.tokens, "-npl": case.sessions, "-c": room}
        how = [text for flag, size in sizes.items() for text in (flag, str(size))]
        command = [*self._command(self._batched, flash), *how, "--output-format", "jsonl"]
        times = []
        for _ in range(case.repeats):
            lines = [line for line in self._output(command).splitlines() if line.startswith("{")]
            (found,) = map(json.loads, lines)
            times.append(found["t_tg"] * 1e3 / case.tokens)
        return times

    def _command(self, program: Path, flash: str) -> list[str]:
        return [str(program), *self._common, "-fa", flash]

    def _output(self, command: Sequence[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise EngineFailed(f"{self.name}: exit code {done.returncode}: {last}")
        return done.stdout
