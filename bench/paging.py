"""`python -m bench paging`: what attention over blocks costs beside the same attention over dense memory.

One session's decode step at a context, as two programs with the same weights, inputs and inner loop: one
finds its keys and values through the block table, in blocks scattered over a big pool; the other has them in
one piece per layer, [heads, context, head_size], and reads no table. Both must give the same bits. Runs
alternate. Knows launches as the native executor does, and nothing of how they compute.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pagecast_native
import torch

from bench.loading import BLOCK_SIZE, Bench
from worker.kv.storage import KvStorage
from worker.plan.decode_session import step_program
from worker.plan.graph import StepInputs
from worker.plan.native import NativeExecutor
from worker.plan.program import Capacity, KvLayer, Launch, Program

POOL_BLOCKS = 1024
LIMIT = 1.05
SHORT_CONTEXT = 128
CAPACITIES = (1024, 8192)

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pair:
    """Medians of two programs that took turns.

    Attributes:
        what: What the first of them has and the second has not.
        context: Tokens that the step attends.
        step_ms: Whole decode step of each.
        attention_ms: Attention launches of each, all layers, each as its longest thread took it.
    """

    what: str
    context: int
    step_ms: tuple[float, float]
    attention_ms: tuple[float, float]

    @property
    def step_ratio(self) -> float:
        """First over second, whole step."""
        return self.step_ms[0] / self.step_ms[1]

    @property
    def attention_ratio(self) -> float:
        """First over second, attention alone."""
        return self.attention_ms[0] / self.attention_ms[1]


class _DenseExecutor(NativeExecutor):
    """The same program with attention over keys and values that lie in one piece per layer.

    Args:
        dense: Per layer keys and values, each float32 [heads, context, head_size].
    """

    def __init__(
        self,
        program: Program,
        inputs: StepInputs,
        bench: Bench,
        kv: KvStorage,
        team: pagecast_native.Team,
        dense: Sequence[tuple[_Floats, _Floats]],
    ) -> None:
        self._dense = dense
        super().__init__(program, inputs, bench.llama.store, kv, team)

    def _add(self, launch: Launch) -> None:
        if launch.operator != "paged_attention":
            super()._add(launch)
            return
        q, layer, _, _, context_len, query_start, scale = launch.arguments
        if not isinstance(layer, KvLayer) or not isinstance(scale, float):
            raise TypeError(f"attention reads its keys from {layer}, its scale from {scale}")
        keys, values = self._dense[layer.layer]
        (out,) = launch.outputs
        self._program.dense_attention(
            self._operand(q),
            keys,
            values,
            self._operand(context_len),
            self._operand(query_start),
            scale,
            self._operand(out),
        )


class _Step:
    """One session's decode step at a context, in blocks scattered over a pool that holds noise there."""

    def __init__(self, bench: Bench, context: int, max_context_tokens: int) -> None:
        num_blocks = -(-context // BLOCK_SIZE)
        capacity = Capacity(1, 1, -(-max_context_tokens // BLOCK_SIZE))
        drawn = random.Random(context).sample(range(POOL_BLOCKS), num_blocks)  # noqa: S311 - no secret
        self.bench = bench
        self.kv = bench.pool(POOL_BLOCKS)
        self.blocks = torch.tensor(drawn)
        noise = torch.Generator().manual_seed(context)
        for block in drawn:
            self.kv.data[block].normal_(generator=noise)
        table = torch.zeros(1, capacity.max_blocks, dtype=torch.int32)
        table[0, :num_blocks] = self.blocks
        last = context - 1
        self.inputs = StepInputs(
            token_ids=torch.tensor([1], dtype=torch.int32),
            position=torch.tensor([last], dtype=torch.int32),
            slot_mapping=torch.tensor([drawn[-1] * BLOCK_SIZE + last % BLOCK_SIZE]),
            block_table=table,
            context_len=torch.tensor([context], dtype=torch.int32),
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            logits_index=torch.tensor([0], dtype=torch.int32),
        )
        self.context = context
        self.program = step_program(bench.llama, self.kv, capacity)

    def paged(self, team: pagecast_native.Team) -> NativeExecutor:
        """The program as it is, having run once: the new token's keys and values are stored."""
        executor = NativeExecutor(self.program, self.inputs, self.bench.llama.store, self.kv, team)
        _run(executor)
        return executor

    def dense(self, team: pagecast_native.Team) -> NativeExecutor:
        """Its twin over copies of the keys and values as they are now."""
        layers = zip(self.kv.keys, self.kv.values, strict=True)
        dense = [(self._in_one_piece(keys), self._in_one_piece(values)) for keys, values in layers]
        return _DenseExecutor(self.program, self.inputs, self.bench, self.kv, team, dense)

    def _in_one_piece(self, cache: torch.Tensor) -> _Floats:
        rows = cache[self.blocks].flatten(0, 1)[: self.context]
        return np.ascontiguousarray(rows.transpose(0, 1).numpy())


def _run(executor: NativeExecutor) -> None:
    executor.run(1, 1, 1)


def measure(bench: Bench, contexts: Sequence[int], repeats: int) -> list[Pair]:
    """Measures paging at each context, and at `SHORT_CONTEXT` how much the plan's capacity matters.

    Args:
        bench: On native kernels.
        contexts: Tokens that a step attends, its own included.
        repeats: Runs of each program; medians are given.

    Raises:
        ValueError: A context does not fit pool or model, or bits differ.
    """
    most = min(bench.llama.config.max_context_tokens, POOL_BLOCKS * BLOCK_SIZE)
    if max(contexts) > most:
        raise ValueError(f"--context: {max(contexts)} is over {most}")
    team = pagecast_native.Team(bench.num_threads)
    try:
        pairs = [_paging(bench, context, repeats, team) for context in contexts]
        if most >= SHORT_CONTEXT:
            pairs.append(_capacity(bench, repeats, team))
    finally:
        team.close()
    return pairs


def _paging(bench: Bench, context: int, repeats: int, team: pagecast_native.Team) -> Pair:
    step = _Step(bench, context, bench.llama.config.max_context_tokens)
    paged = step.paged(team)
    dense = step.dense(team)
    _run(dense)
    if not torch.equal(paged.output.view(torch.int32), dense.output.view(torch.int32)):
        raise ValueError(f"at {context} tokens the paged and the dense step differ in bits")
    return _pair("paged / dense", context, step.program, (paged, dense), repeats)


def _capacity(bench: Bench, repeats: int, team: pagecast_native.Team) -> Pair:
    small, large = (_Step(bench, SHORT_CONTEXT, most) for most in CAPACITIES)
    executors = (large.paged(team), small.paged(team))
    what = f"max {CAPACITIES[1]} / max {CAPACITIES[0]}"
    return _pair(what, SHORT_CONTEXT, small.program, executors, repeats)


def _pair(
    what: str, context: int, program: Program, pair: tuple[NativeExecutor, NativeExecutor], repeats: int
) -> Pair:
    places = [n for n, launch in enumerate(program.launches) if launch.operator == "paged_attention"]
    step_ns: tuple[list[int], list[int]] = ([], [])
    attention_ns: tuple[list[int], list[int]] = ([], [])
    for number in range(repeats):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            start_ns = time.perf_counter_ns()
            _run(pair[index])
            step_ns[index].append(time.perf_counter_ns() - start_ns)
            launch_ns = pair[index].launch_ns
            attention_ns[index].append(sum(launch_ns[place] for place in places))
    steps, attention = (
        (statistics.median(times[0]) / 1e6, statistics.median(times[1]) / 1e6)
        for times in (step_ns, attention_ns)
    )
    return Pair(what, context, steps, attention)
