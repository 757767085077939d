"""Sessions of a client process of its own: `python -m bench.served_client TARGET MODEL`.

Answers questions as `bench.peer_driver` does, one JSON object a line, by streams of the public asyncio
client. Beside times it tells what CPU it took itself, and what the processes that a question names took.
Knows nothing of the inside of gateway or worker.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import pagecast
from bench.processes import cpu_s

_TIMEOUT_S = 600.0
_FIRST_ID, _END_ID = 3, 259
"""Ids that prompts are drawn from: bytes and words of any vocabulary here."""


class _Window:
    """The time in which every session decodes: from the last one's first token to the first one's last.

    Args:
        num_sessions: How many there are.
        processes: Pids by name, whose CPU time is told.
    """

    def __init__(self, num_sessions: int, processes: Mapping[str, int]) -> None:
        self._waiting = num_sessions
        self._processes = dict(processes) | {"client": os.getpid()}
        self._start: tuple[float, dict[str, float]] | None = None
        self._end: tuple[float, dict[str, float]] | None = None

    def first(self) -> None:
        """A session has its first token."""
        self._waiting -= 1
        if self._waiting == 0 and self._end is None:
            self._start = self._now()

    def last(self) -> None:
        """A session has its last token."""
        if self._end is None:
            self._end = self._now()

    def told(self, arrivals: list[list[tuple[float, int]]]) -> dict[str, Any]:
        """Tokens per second of all sessions and each process's share of a CPU.

        Raises:
            ValueError: A session ended before another had begun.
        """
        if self._start is None or self._end is None:
            raise ValueError("a session ended before all had begun; draw more tokens")
        (start, cpu_before), (end, cpu_after) = self._start, self._end
        inside = sum(number for session in arrivals for at, number in session if start < at <= end)
        wall_s = end - start
        shares = {name: (cpu_after[name] - cpu_before[name]) / wall_s for name in cpu_before}
        return {"tokens_per_s": inside / wall_s, "cpu": shares}

    def _now(self) -> tuple[float, dict[str, float]]:
        return time.perf_counter(), {name: cpu_s(pid) for name, pid in self._processes.items()}


async def decode(client: pagecast.AsyncClient, model: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """Sessions whose prompts are computed begin a turn at once and stream it.

    Returns:
        `tokens_per_s` and `cpu` of the time in which all of them decode, and `itl_ms`: every time between
        two tokens of a session, in ms.
    """
    number, tokens = int(question["sessions"]), int(question["tokens"])
    window = _Window(number, question["processes"])
    async with AsyncExitStack() as stack:
        sessions = []
        for index in range(number):
            session = await stack.enter_async_context(await client.open_session(model, temperature=0.0))
            await session.append(_prompt(index, int(question["context"])), timeout_s=_TIMEOUT_S)
            sessions.append(session)
        arrivals = await asyncio.gather(*(_stream(each, tokens, window) for each in sessions))
    # A chunk's tokens came together; each waited as long as the chunk did, over their number.
    itl_ms = [
        (at - before) * 1e3 / number
        for session in arrivals
        for (before, _), (at, number) in pairwise(session)
        for _ in range(number)
    ]
    return window.told(arrivals) | {"itl_ms": itl_ms}


async def _stream(
    session: pagecast.AsyncClientSession, tokens: int, window: _Window
) -> list[tuple[float, int]]:
    """When each chunk came, and how many tokens it had."""
    arrivals: list[tuple[float, int]] = []
    left = tokens + 1
    options: dict[str, Any] = {"max_tokens": left, "ignore_eos": True, "timeout_s": _TIMEOUT_S}
    async with session.generate(None, **options) as generation:
        async for chunk in generation:
            if not chunk.token_ids:
                continue
            arrivals.append((time.perf_counter(), len(chunk.token_ids)))
            left -= len(chunk.token_ids)
            if len(arrivals) == 1:
                window.first()
            if left == 0:
                window.last()
    return arrivals


async def first_token(
    client: pagecast.AsyncClient, model: str, question: Mapping[str, Any]
) -> dict[str, Any]:
    """From sending a prompt to its first token, as `ms`."""
    session = await client.open_session(model, temperature=0.0)
    async with session:
        prompt = _prompt(0, int(question["context"]))
        start = time.perf_counter()
        async with session.generate(prompt, max_tokens=1, timeout_s=_TIMEOUT_S) as generation:
            async for chunk in generation:
                if chunk.token_ids:
                    return {"ms": (time.perf_counter() - start) * 1e3}
    raise ValueError("the turn ended without a token")


async def answer(client: pagecast.AsyncClient, model: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """Answers a question; what goes wrong is the answer."""
    ask = {"decode": decode, "first_token": first_token}
    try:
        return await ask[question["what"]](client, model, question)
    except Exception as error:  # noqa: BLE001 - the next question may be answered
        return {"error": f"{type(error).__name__}: {error}"}


async def converse(target: str, model: str) -> None:
    """Answers the questions on standard input until there are no more."""
    async with pagecast.AsyncClient(target) as client:
        _say({"ready": "pagecast"})
        while line := await asyncio.to_thread(sys.stdin.readline):
            _say(await answer(client, model, json.loads(line)))


def _say(found: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def _prompt(index: int, num_tokens: int) -> list[int]:
    rng = random.Random(index)  # noqa: S311 - no secret
    return [rng.randrange(_FIRST_ID, _END_ID) for _ in range(num_tokens)]


if __name__ == "__main__":
    asyncio.run(converse(*sys.argv[1:]))
