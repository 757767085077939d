"""What whole steps take beside the card's best: decode over rows and contexts, prefill.

Steps run as the engine runs them: tokens are drawn on the device, and each step is launched before the one
before it is read. The floor of a step is the larger of two times: its bytes, weights and attended keys and
values, over the bandwidth of a copy, and its floating point operations over the rate of a large product.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise

import torch

from bench.gpu_dry import plan_of
from bench.gpu_models import (
    BLOCK_SIZE,
    Step,
    block_bytes,
    decode_steps,
    matrix_shapes,
    prefill_step,
    random_llama,
    random_pool,
    scattered,
)
from bench.gpu_timing import copy_bandwidth, matmul_rate
from bench.gpu_values import Case, Line, Setting
from worker.batch import TokenClass
from worker.model.config import LlamaConfig
from worker.runner import Runner

ROWS = (1, 8, 64, 256)
CONTEXTS = (512, 4096, 32768)
PREFILL_TOKENS = (512, 2048)
LEAST_SHARE = 0.6
"""Of the floor, that a decode step must reach."""
JUDGED_ROWS = (1, 64)
_RESERVE_BYTES = 10 << 30
"""Kept free for arenas, workspaces and graphs."""
_WARM_STEPS = 4
_STEPS = 24


def cases_of(name: str, config: LlamaConfig, setting: Setting) -> list[Case]:
    """Cases of one model: every number of rows with every context, then prefill."""
    if setting.compiles_alone:
        alone = StepBench(config, setting, most_tokens=1024)
        return [Case(name, alone.warm_up)]
    bench = StepBench(config, setting)
    rows: Sequence[int] = (1, 3) if setting.is_tiny else ROWS
    contexts: Sequence[int] = (40, 72) if setting.is_tiny else CONTEXTS
    lengths: Sequence[int] = (24,) if setting.is_tiny else PREFILL_TOKENS
    decode, prefill = (_plan(config, each) if setting.is_dry else "" for each in TokenClass)
    listed = []
    for context in contexts:
        for count in rows:
            label = f"{name}: decode, {count} rows, context {context}"
            listed.append(Case(label, partial(bench.decode, name, count, context), decode))
    for length in lengths:
        label = f"{name}: prefill of {length} tokens"
        listed.append(Case(label, partial(bench.prefill, name, length), prefill))
    return listed


def _plan(config: LlamaConfig, token_class: TokenClass) -> str:
    return plan_of(config, token_class, max_step_tokens=max(PREFILL_TOKENS), max_step_rows=max(ROWS))


class StepBench:
    """A model of random weights, made when it is first used, and steps over it.

    Args:
        config: Its sizes.
        setting: Where, and how much.
        most_rows: Of a step.
        most_tokens: Of all rows' contexts, that room is made for; less is taken where memory ends.
    """

    def __init__(
        self, config: LlamaConfig, setting: Setting, *, most_rows: int = max(ROWS), most_tokens: int = 2 << 20
    ) -> None:
        self._config = config
        self._setting = setting
        self._device = torch.device(setting.device)
        self._dtype = torch.float32 if setting.is_tiny else torch.bfloat16
        self._most_rows = 4 if setting.is_tiny else most_rows
        self._most_tokens = 512 if setting.is_tiny else most_tokens
        self._most_step_tokens = 32 if setting.is_tiny else max(PREFILL_TOKENS)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a copy."""
        return copy_bandwidth(self._device)

    @cached_property
    def rate(self) -> float:
        """Floating point operations per second of a product."""
        return matmul_rate(self._device)

    @cached_property
    def _model_pool_blocks(self) -> int:
        """Blocks that there is memory for, once the weights are there."""
        wanted = self._most_tokens // BLOCK_SIZE
        if self._device.type == "cpu":
            return wanted
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(1, min(wanted, (free - _RESERVE_BYTES) // block_bytes(self._config, self._dtype)))

    @cached_property
    def runner(self) -> Runner:
        """Warm, over a pool that fills the memory it may."""
        if not self._setting.compiles_alone:
            # What a floor is made of is measured while there is room for it.
            _ = self.bandwidth, self.rate
        model = random_llama(self._config, dtype=self._dtype, device=self._device)
        pool = random_pool(self._config, self._model_pool_blocks, dtype=self._dtype, device=self._device)
        runner = Runner(
            model,
            pool,
            kernels="triton",
            max_step_tokens=self._most_step_tokens,
            max_step_rows=self._most_rows,
            vocab_size=self._config.vocab_size,
        )
        runner.warm_up()
        return runner

    def warm_up(self) -> list[Line]:
        """Makes all this, no more."""
        _ = self.runner
        return []

    def floor_ms(self, num_tokens: int, *, attended: int, num_logits: int, kv_tokens: int) -> float:
        """Least time of a step.

        Args:
            num_tokens: That it computes.
            attended: Tokens that these attend, summed over them.
            num_logits: Rows of logits.
            kv_tokens: Tokens whose keys and values are read.
        """
        config = self._config
        shapes = matrix_shapes(config)
        del shapes["token_embd.weight"]
        head = config.vocab_size * config.hidden_size
        inner = sum(rows * columns for rows, columns in shapes.values()) - head
        num_bytes = (inner + head) * self._dtype.itemsize
        num_bytes += kv_tokens * block_bytes(config, self._dtype) // BLOCK_SIZE
        operations = 2 * (inner * num_tokens + head * num_logits)
        operations += 4 * attended * config.num_layers * config.num_heads * config.head_size
        return max(num_bytes / self.bandwidth, operations / self.rate) * 1e3

    def decode_ms(self, num_rows: int, context: int) -> float | None:
        """Median time from one step's tokens to the next one's; None: the pool is too small."""
        runner = self.runner
        count = _WARM_STEPS + (4 if self._setting.is_tiny else _STEPS)
        if num_rows > self._most_rows or num_rows * -(-context // BLOCK_SIZE) > self._model_pool_blocks:
            return None
        steps = decode_steps(scattered(num_rows, context), context, count)
        return statistics.median(run_ahead(runner, steps)[_WARM_STEPS:])

    def decode(self, name: str, num_rows: int, context: int) -> Iterator[Line]:
        """One figure, held against its floor where that is promised."""
        milliseconds = self.decode_ms(num_rows, context)
        label = f"{name}: decode, {num_rows} rows, context {context}"
        if milliseconds is None:
            yield Line(label, note="left out: its keys and values do not fit the memory")
            return
        attended = num_rows * context
        floor = self.floor_ms(num_rows, attended=attended, num_logits=num_rows, kv_tokens=attended)
        judged = self._setting.judges_speed and num_rows in JUDGED_ROWS
        yield Line(
            label,
            milliseconds,
            "ms/token",
            floor,
            passed=floor / milliseconds >= LEAST_SHARE if judged else None,
            note=f"{num_rows / milliseconds * 1e3:.0f} tokens/s",
        )

    def prefill(self, name: str, length: int) -> Iterator[Line]:
        """One row of input at once, from its launch until its first token is there."""
        runner = self.runner
        (table,) = scattered(1, length)
        step = prefill_step(table, [1 + at % 97 for at in range(length)])
        times = []
        for _ in range(2 if self._setting.is_tiny else 6):
            start = time.perf_counter()
            runner.launch(step.batch, step.draws).read()
            times.append((time.perf_counter() - start) * 1e3)
        milliseconds = statistics.median(times[1:])
        attended = length * (length + 1) // 2
        floor = self.floor_ms(length, attended=attended, num_logits=1, kv_tokens=length)
        note = f"{length / milliseconds * 1e3:.0f} tokens/s"
        yield Line(f"{name}: prefill of {length} tokens", milliseconds, "ms", floor, note=note)


def run_ahead(runner: Runner, steps: Sequence[Step]) -> list[float]:
    """Runs steps, each launched before the one before it is read; milliseconds from read to read.

    Raises:
        ArithmeticError: A row's token could not be drawn.
    """
    marks = [time.perf_counter()]
    unread = None
    for step in (*steps, None):
        launched = None if step is None else runner.launch(step.batch, step.draws)
        if unread is not None:
            if None in unread.read().drawn:
                raise ArithmeticError("a row had no token: its logits are not finite")
            marks.append(time.perf_counter())
        unread = launched
    return [(end - start) * 1e3 for start, end in pairwise(marks)]
