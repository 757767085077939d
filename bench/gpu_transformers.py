"""Section: decode beside `transformers` of the same shapes, static cache, eager and compiled."""

import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from bench.gpu_models import TINY, TINYLLAMA
from bench.gpu_steps import StepBench
from bench.gpu_values import Case, Line, Setting
from worker.model.config import LlamaConfig

ROWS = (1, 64)
CONTEXT = 512
LEAST_RATIO = 3.0
"""Of the time of `transformers`, compiled where that works, over ours."""
_STEPS = 24


def cases(setting: Setting) -> list[Case]:
    """Each number of rows: ours beside theirs, eager; then, which may outlast the time, theirs compiled."""
    if not setting.is_dry and find_spec("transformers") is None:
        return [
            Case(
                "transformers", lambda: [Line("transformers", note="not installed: nothing to compare with")]
            )
        ]
    bench = _Comparison(setting)
    rows = (2,) if setting.is_tiny else ROWS
    ways = {"eager": bench.eager} if setting.is_tiny else {"eager": bench.eager, "compiled": bench.compiled}
    return [
        Case(f"TinyLlama-1.1B, {count} rows, context {CONTEXT}, {name}", partial(run, count))
        for name, run in ways.items()
        for count in rows
    ]


class _Comparison:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._config = TINY if setting.is_tiny else TINYLLAMA
        self._context = 40 if setting.is_tiny else CONTEXT
        self._ours = StepBench(
            self._config, setting, most_rows=max(ROWS), most_tokens=max(ROWS) * 2 * CONTEXT
        )
        self._found: dict[int, float] = {}

    @cached_property
    def _theirs(self) -> Any:
        return _llama(self._config, torch.device(self._setting.device), is_tiny=self._setting.is_tiny)

    def eager(self, num_rows: int) -> Iterator[Line]:
        """Ours, theirs as it is, and the ratio."""
        name = f"{num_rows} rows, context {self._context}"
        ours = self._ours.decode_ms(num_rows, self._context)
        if ours is None:
            raise MemoryError("the pool is too small")
        self._found[num_rows] = ours
        yield Line(f"{name}: ours", ours, "ms/token")
        yield from self._told(num_rows, "eager", self._theirs)

    def compiled(self, num_rows: int) -> Iterator[Line]:
        """Theirs compiled, and the ratio, of which nothing is promised where it does not compile."""
        forward = torch.compile(self._theirs.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)
        try:
            yield from self._told(num_rows, "compiled", forward)
        except Exception as error:  # noqa: BLE001 - whether it compiles is not ours
            lines = str(error).strip().splitlines() or [type(error).__name__]
            yield Line(f"{num_rows} rows: transformers, compiled", note=f"failed: {lines[0][:200]}")

    def _told(self, num_rows: int, way: str, forward: Callable[..., Any]) -> Iterator[Line]:
        name, theirs = f"{num_rows} rows, context {self._context}", self._milliseconds(num_rows, forward)
        yield Line(f"{name}: transformers, {way}", theirs, "ms/token")
        if (ours := self._found.get(num_rows)) is not None:
            passed = theirs / ours >= LEAST_RATIO if self._setting.judges_speed else None
            yield Line(f"{name}: times faster than {way}", theirs / ours, passed=passed)

    def _milliseconds(self, num_rows: int, forward: Callable[..., Any]) -> float:
        """Median time of a greedy step that draws on the device, as `generate` does it."""
        device = torch.device(self._setting.device)
        count = 4 if self._setting.is_tiny else _STEPS
        cache = import_module("transformers").StaticCache(
            config=self._theirs.config, max_cache_len=self._context + 8
        )
        ids: Tensor = torch.ones(num_rows, self._context - count - 4, dtype=torch.long, device=device)
        times = []
        with torch.inference_mode():
            at = torch.arange(ids.shape[1], device=device)
            # The prompt goes through the model as it is: compiled for its length it would be used once.
            logits = self._theirs(
                ids, past_key_values=cache, cache_position=at, use_cache=True, logits_to_keep=1
            ).logits
            token = logits[:, -1:].argmax(-1)
            for step in range(count + 4):
                at = torch.tensor([ids.shape[1] + step], device=device)
                start = time.perf_counter()
                logits = forward(token, past_key_values=cache, cache_position=at, use_cache=True).logits
                token = logits[:, -1:].argmax(-1).clone()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append((time.perf_counter() - start) * 1e3)
        return sorted(times[4:])[len(times[4:]) // 2]


def _llama(config: LlamaConfig, device: torch.device, *, is_tiny: bool) -> Any:
    """Their model of these shapes, of random weights."""
    transformers = import_module("transformers")
    theirs = transformers.LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_context_tokens,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model = transformers.LlamaForCausalLM(theirs)
    return model.to(torch.float32 if is_tiny else torch.bfloat16).eval()
