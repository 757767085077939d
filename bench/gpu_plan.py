"""Section: the plan gate on this device, and what a step launches and moves."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu_models import BLOCK_SIZE, SHALLOW, TINY, decode_steps, random_llama, random_pool, scattered
from bench.gpu_steps import run_ahead
from bench.gpu_values import Case, Line, Setting
from worker.batch import Batch, TokenClass
from worker.plan.gate import check_plan_parity, ragged_steps
from worker.runner import Runner

BYTES_BACK = 4
"""Per row and step that cross to the host: the token's id."""
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")
_LAUNCHES = (
    *("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchCooperativeKernel"),
    *("hipLaunchKernel", "hipExtLaunchKernel", "hipModuleLaunchKernel", "hipExtModuleLaunchKernel"),
)
"""How names start: some versions of the profiler add `ExC` or the driver's version."""
_PROFILED_STEPS = 8


def cases(setting: Setting) -> list[Case]:
    """The gate in both classes and dtypes, then steps under the profiler."""
    dtypes = (torch.float32,) if setting.is_tiny else (torch.bfloat16, torch.float32)
    gates = [
        Case(f"plan gate, {dtype}, {token_class.value}", partial(_gate, setting, dtype, token_class))
        for dtype in dtypes
        for token_class in TokenClass
    ]
    rows = (2,) if setting.is_tiny else (1, 8, 64)
    return gates + [
        Case(f"what a step of {count} rows moves", partial(_moves, setting, count)) for count in rows
    ]


def _runner(setting: Setting, dtype: torch.dtype, *, num_blocks: int, rows: int, tokens: int) -> Runner:
    config, device = TINY if setting.is_tiny else SHALLOW, torch.device(setting.device)
    return Runner(
        random_llama(config, dtype=dtype, device=device),
        random_pool(config, num_blocks, dtype=dtype, device=device),
        kernels="triton",
        max_step_tokens=tokens,
        max_step_rows=rows,
        vocab_size=config.vocab_size,
    )


def _gate(setting: Setting, dtype: torch.dtype, token_class: TokenClass) -> Iterator[Line]:
    sessions, num_steps = (3, 12) if setting.is_tiny else (16, 24)
    steps = ragged_steps(
        num_steps=num_steps,
        num_sessions=sessions,
        vocab_size=TINY.vocab_size,
        block_size=BLOCK_SIZE,
        num_blocks=8 * sessions,
        seed=5,
    )
    batches = [Batch(tuple(row._replace(token_class=token_class) for row in step.rows)) for step in steps]
    once, anew = (
        _runner(setting, dtype, num_blocks=8 * sessions, rows=sessions, tokens=32 * sessions)
        for _ in range(2)
    )
    found = check_plan_parity(once, anew, batches)
    note = (
        f"{found.num_steps} steps, {found.num_logit_rows} rows of logits, {found.launches_per_step} launches"
    )
    yield Line(f"plan gate, {dtype}, {token_class.value}", passed=True, note=note)


def _moves(setting: Setting, num_rows: int) -> Iterator[Line]:
    dtype = torch.float32 if setting.is_tiny else torch.bfloat16
    context, count = 40, _PROFILED_STEPS
    runner = _runner(setting, dtype, num_blocks=num_rows * 3, rows=num_rows, tokens=max(4, num_rows))
    runner.warm_up()
    tables = scattered(num_rows, context)
    run_ahead(runner, decode_steps(tables, context - count, 2))
    steps = decode_steps(tables, context, count)
    if setting.device == "cpu":
        for step in steps:
            told = runner.launch(step.batch, step.draws).read().results[0]
        yield Line(f"{num_rows} rows: launches of a step", float(told.launches))
        yield Line(f"{num_rows} rows: bytes both ways, per row", told.host_bytes / num_rows)
        return
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profiler:
        run_ahead(runner, steps)
        torch.cuda.synchronize()
    yield from _told(profiler, num_rows, count)


def _told(profiler: Any, num_rows: int, num_steps: int) -> Iterator[Line]:
    calls, num_bytes = _counts(profiler)
    graphs, others = (
        sum(count for name, count in calls.items() if name.startswith(starts))
        for starts in (_GRAPH_LAUNCHES, _LAUNCHES)
    )
    yield Line(f"{num_rows} rows: graph launches of a step", graphs / num_steps, passed=graphs == num_steps)
    yield Line(f"{num_rows} rows: kernel launches beside them", others / num_steps, passed=others == 0)
    back, there = num_bytes["DtoH"] / num_steps / num_rows, num_bytes["HtoD"] / num_steps / num_rows
    yield Line(f"{num_rows} rows: bytes to the host, per row", back, passed=back == BYTES_BACK)
    yield Line(f"{num_rows} rows: bytes to the device, per row", there)
    copies = calls["Memcpy HtoD"] / num_steps
    yield Line(f"{num_rows} rows: copies to the device, of a step", copies, passed=copies == 1)


def _counts(profiler: Any) -> tuple[Counter[str], Counter[str]]:
    """Calls of the runtime and copies by name, and bytes of copies by direction."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    calls: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for event in events:
        category, name = event.get("cat", ""), event.get("name", "")
        if category in ("cuda_runtime", "cuda_driver"):
            calls[name] += 1
        elif category == "gpu_memcpy":
            direction = next((each for each in ("DtoH", "HtoD") if each in name), "other")
            calls[f"Memcpy {direction}"] += 1
            num_bytes[direction] += int(event.get("args", {}).get("bytes", 0))
    return calls, num_bytes
