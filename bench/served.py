"""`pagecast bench decode --through grpc`: the same steps through gateway and worker, beside in process.

A real server, as `pagecast serve` starts it, and a client process of its own take turns with the sessions in
this process: who waits does nothing. Knows command lines and answers, and nothing of the inside of either.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import pagecast
from bench.decode import Decoder, Wish
from bench.loading import BLOCK_SIZE, Bench
from bench.peer_engines import SpokenEngine
from bench.processes import children, command_line, resident_bytes
from bench.server_process import Server, serving
from service.commands.models import only_model
from worker.model.weights.gguf import resolve_model_spec

LOG = Path(".run/bench-serve.log")
_LEAST_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class ServedDecode:
    """Sessions that decode at one context, served and in process; medians over the rounds.

    Attributes:
        sessions: That decode at once.
        context: Tokens of each one's prompt.
        tokens_per_s: Of all sessions together, as the client counts them.
        in_process_tokens_per_s: The same, of the sessions in this process.
        itl_ms: Median time between two tokens of a session, seen by the client.
        in_process_ms: Median step in process.
        cpu: By process, the share of a CPU that it took.
    """

    sessions: int
    context: int
    tokens_per_s: float
    in_process_tokens_per_s: float
    itl_ms: float
    in_process_ms: float
    cpu: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Served tokens per second over those in process."""
        return self.tokens_per_s / self.in_process_tokens_per_s

    @property
    def added_ms(self) -> float:
        """What serving adds to the median time between two tokens."""
        return self.itl_ms - self.in_process_ms


@dataclass(frozen=True, slots=True)
class ServedFirstToken:
    """Medians of a prompt's first token.

    Attributes:
        prompt: Tokens.
        ms: Served.
        in_process_ms: In process.
    """

    prompt: int
    ms: float
    in_process_ms: float


@dataclass(frozen=True, slots=True)
class Served:
    """What a run gave.

    Attributes:
        decodes: By case.
        first_tokens: By length of prompt.
        worker_bytes: The worker's resident memory at the end.
        pool_bytes: Of it at most the KV pool's.
        file_bytes: Size of the model's file.
    """

    decodes: tuple[ServedDecode, ...]
    first_tokens: tuple[ServedFirstToken, ...]
    worker_bytes: int
    pool_bytes: int
    file_bytes: int

    @property
    def beside_bytes(self) -> int:
        """Memory of the worker beside weights, in the file's size, and its pool."""
        return self.worker_bytes - self.file_bytes - self.pool_bytes


def measure_served(
    bench: Bench,
    wish: Wish,
    flags: Sequence[str],
    console: Console,
    on_round: Callable[[int], None] | None = None,
) -> Served:
    """Measures every case in every round, served and in process in turn.

    Args:
        bench: In process; of the model and settings that `flags` name.
        wish: What is measured.
        flags: Of `pagecast serve`.
        console: Shows that the server starts.
        on_round: Told each round's number when it is done.

    Raises:
        ValueError: As `Decoder`.
        bench.server_process.ServerError: The server did not start or stop.
        bench.peer_engines.EngineFailed: A call failed.
    """
    decoder = Decoder(bench, wish)
    cases = wish.decodes()
    needed = (number * -(-(context + wish.tokens + 2) // BLOCK_SIZE) for number, context in cases)
    num_blocks = max(_LEAST_BLOCKS, *needed)
    flags = [*flags, "--kv-blocks", str(num_blocks)]
    ours: list[list[list[float]]] = [[] for _ in cases]
    served: list[list[Answer]] = [[] for _ in cases]
    firsts: list[list[tuple[float, float]]] = [[] for _ in wish.prompts]
    with _running(flags, console) as (server, client):
        pids = _pids(server)
        for number in range(wish.rounds):
            for case, (sessions, context) in enumerate(cases):
                ours[case].append(decoder.decode(case))
                sizes = {"sessions": sessions, "context": context, "tokens": wish.tokens}
                told = client.ask({"what": "decode", "processes": pids} | sizes)
                served[case].append(Answer(told["tokens_per_s"], tuple(told["itl_ms"]), told["cpu"]))
            for case, prompt in enumerate(wish.prompts):
                told = client.ask({"what": "first_token", "context": prompt})
                firsts[case].append((float(told["ms"]), decoder.first_token(case)))
            if on_round is not None:
                on_round(number)
        worker_bytes = resident_bytes(pids["worker"])
    return Served(
        tuple(_decode(*case, ours[place], served[place]) for place, case in enumerate(cases)),
        tuple(
            ServedFirstToken(prompt, *(statistics.median(times) for times in zip(*pairs, strict=True)))
            for prompt, pairs in zip(wish.prompts, firsts, strict=True)
        ),
        worker_bytes=worker_bytes,
        pool_bytes=num_blocks * bench.pool(1).num_bytes,
        file_bytes=resolve_model_spec(bench.name).stat().st_size,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client told of one round: tokens per second, times between tokens, CPU shares."""

    tokens_per_s: float
    itl_ms: tuple[float, ...]
    cpu: Mapping[str, float]


def _decode(
    sessions: int, context: int, ours: Sequence[Sequence[float]], served: Sequence[Answer]
) -> ServedDecode:
    return ServedDecode(
        sessions=sessions,
        context=context,
        tokens_per_s=statistics.median(each.tokens_per_s for each in served),
        in_process_tokens_per_s=statistics.median(sessions * 1e3 / statistics.fmean(times) for times in ours),
        itl_ms=statistics.median(statistics.median(each.itl_ms) for each in served),
        in_process_ms=statistics.median(statistics.median(times) for times in ours),
        cpu={name: statistics.median(each.cpu[name] for each in served) for name in served[0].cpu},
    )


@contextmanager
def _running(flags: Sequence[str], console: Console) -> Iterator[tuple[Server, SpokenEngine]]:
    with serving(LOG, console, flags) as server:
        with pagecast.Client(server.target) as client:
            model = only_model(client)
        command = [sys.executable, "-P", "-m", "bench.served_client", server.target, model]
        engine = SpokenEngine("client", command, LOG.with_name("bench-client.log"))
        try:
            yield server, engine
        finally:
            engine.close()


def _pids(server: Server) -> dict[str, int]:
    """The gateway's and the worker's."""
    workers = [pid for pid in children(server.pid) if command_line(pid)[1:3] == ["-m", "worker"]]
    return {"gateway": server.pid} | {f"worker {n}" if n else "worker": pid for n, pid in enumerate(workers)}
