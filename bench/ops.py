"""`pagecast bench ops`: where a step's time goes, operator by operator.

A step's program is run as a plan runs it, and each launch's time is its longest thread's. Work is counted
from the program's shapes: bytes of weights, keys and values that have to be read, and multiplications whose
products are added up. Knows programs and native executors; draws no token.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from bench.decode import random_prompts
from bench.floor import PRODUCTS, Reader, packed_weight, token_bytes
from bench.loading import BLOCK_SIZE, Bench, scattered_tables
from worker.batch import DecodePlan, Row
from worker.kv.storage import KvStorage
from worker.model.weights.store import WeightStore
from worker.plan.decode_session import PagedDecodeSession, PlanKey
from worker.plan.graph import StepInputs
from worker.plan.native import NativeExecutor, NativeKernels
from worker.plan.program import Extent, Launch, Program

_READS = 3
"""Of the machine's bandwidth, before the runs and again behind them."""


@dataclass(frozen=True, slots=True)
class Work:
    """What launches have to do.

    Attributes:
        read_bytes: Of weights, keys and values.
        macs: Multiplications that are added up.
    """

    read_bytes: float = 0.0
    macs: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.read_bytes + other.read_bytes, self.macs + other.macs)


@dataclass(frozen=True, slots=True)
class Operator:
    """Launches of one operator, and of one shape and format where it has a matrix.

    Attributes:
        name: Operator, and the matrix's rows x columns and formats.
        launches: Of a step.
        us: Of a step, all launches, median of the runs.
        work: Of a step, all launches.
    """

    name: str
    launches: int
    us: float
    work: Work


@dataclass(frozen=True, slots=True)
class Profile:
    """A step.

    Attributes:
        operators: The dearest first.
        step_us: Median time of a run, from call to return.
        kernel_us: Median of what was inside kernels, each as its longest thread took it.
        bandwidth: Bytes per second of this machine, the best that was read before and behind the runs.
    """

    operators: tuple[Operator, ...]
    step_us: float
    kernel_us: float
    bandwidth: float

    @property
    def outside_us(self) -> float:
        """Hand-over, meetings of threads, and the way into native code."""
        return self.step_us - self.kernel_us


class _Kernels(NativeKernels):
    """Keeps the executor that a plan gets, to read its launches' times."""

    made: NativeExecutor

    def executor(
        self, program: Program, inputs: StepInputs, store: WeightStore, kv: KvStorage
    ) -> NativeExecutor:
        """As the kernels themselves."""
        self.made = super().executor(program, inputs, store, kv)
        return self.made


def profile(bench: Bench, reader: Reader, *, sessions: int, context: int, prefill: int, runs: int) -> Profile:
    """Runs one step again and again.

    Args:
        bench: On native kernels.
        reader: Tells the bandwidth.
        sessions: That decode; 0 for none.
        context: Tokens that each of them attends, its own included.
        prefill: Tokens of a prompt that are computed in the same step; 0 for none.
        runs: Medians are over them.

    Raises:
        ValueError: The step is empty or too large, or a context does not fit the model.
    """
    most = bench.llama.config.max_context_tokens
    if not 1 <= context <= most or prefill > most:
        raise ValueError(f"--context, --prefill: {context} and {prefill} have to fit the model's {most}")
    if sessions + prefill == 0:
        raise ValueError("--sessions, --prefill: there is nothing to run")
    lengths = [context] * sessions + [prefill] * (prefill > 0)
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
    kv = bench.pool(num_blocks)
    kernels = _Kernels(num_threads=bench.num_threads, activations=bench.activations)
    key = PlanKey.of(
        bench.llama,
        kv,
        kernels=kernels.name,
        max_step_tokens=sessions + prefill,
        max_step_rows=len(lengths),
    )
    plan = PagedDecodeSession(bench.llama, kv, key, kernels)
    rows = _rows(bench, lengths, num_decoding=sessions, num_blocks=num_blocks)
    plan.bind(rows, key)
    launch_ns: list[list[int]] = []
    step_ns, kernel_ns = [], []
    reads = [reader.read() for _ in range(_READS)]
    plan.run()  # what was read last is no weight
    for _ in range(runs):
        plan.bind(rows, key)
        start_ns = time.perf_counter_ns()
        kernel_ns.append(plan.run())
        step_ns.append(time.perf_counter_ns() - start_ns)
        launch_ns.append(kernels.made.launch_ns)
    reads += [reader.read() for _ in range(_READS)]
    attended = sum(length for length in lengths[:sessions]) + prefill * (prefill + 1) / 2
    read = sum(lengths)
    counted = {Extent.TOKENS: sessions + prefill, Extent.ROWS: len(lengths), Extent.LOGITS: len(lengths)}
    works = [
        _work(bench, kv, launch, counted, attended=attended, read_tokens=read)
        for launch in plan.program.launches
    ]
    return Profile(
        _operators(bench, plan.program, launch_ns, works),
        statistics.median(step_ns) / 1e3,
        statistics.median(kernel_ns) / 1e3,
        max(reads),
    )


def _rows(bench: Bench, lengths: list[int], *, num_decoding: int, num_blocks: int) -> list[Row]:
    free = scattered_tables(num_blocks, 1, num_blocks)
    vocab_size = bench.llama.config.vocab_size
    rows = []
    for number, length in enumerate(lengths):
        count = 1 if number < num_decoding else length
        (ids,) = random_prompts(1, count, vocab_size, seed=number)
        table = tuple(free.pop()[0] for _ in range(-(-length // BLOCK_SIZE)))
        row = Row(
            str(number), tuple(ids), length - count, table, wants_logits=True, plan=DecodePlan.PLAN_ONCE
        )
        rows.append(row)
    return rows


def _work(
    bench: Bench,
    kv: KvStorage,
    launch: Launch,
    counted: Mapping[Extent, int],
    *,
    attended: float,
    read_tokens: int,
) -> Work:
    config = bench.llama.config
    if launch.operator in PRODUCTS:
        packed = packed_weight(bench, launch)
        times = counted[launch.outputs[0].extent]
        return Work(packed.num_bytes, packed.num_rows * packed.num_columns * times)
    if launch.operator == "paged_attention":
        # A dot product and a weighted sum for each pair of tokens; a row's keys and values are read once.
        macs = 2 * config.num_heads * config.head_size * attended
        return Work(token_bytes(kv) / config.num_layers * read_tokens, macs)
    return Work()


def _name(bench: Bench, launch: Launch) -> str:
    if launch.operator in PRODUCTS:
        packed = packed_weight(bench, launch)
        return f"{launch.operator} {packed.num_rows} x {packed.num_columns} {'+'.join(packed.formats)}"
    return launch.operator


def _operators(
    bench: Bench, program: Program, launch_ns: list[list[int]], works: list[Work]
) -> tuple[Operator, ...]:
    places: dict[str, list[int]] = {}
    for place, launch in enumerate(program.launches):
        places.setdefault(_name(bench, launch), []).append(place)
    found = [
        Operator(
            name,
            len(those),
            statistics.median(sum(times[place] for place in those) for times in launch_ns) / 1e3,
            sum((works[place] for place in those), Work()),
        )
        for name, those in places.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.us))
