"""Section: attention and products beside their floors, and beside torch's own in the same run.

Operands are so many that none is in a cache when it is used again, as in a step. The floor of a kernel is the
larger of two times: its bytes over the bandwidth of a copy, its operations over the rate of a large product.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from bench.gpu_models import MAX_CONTEXT
from bench.gpu_operands import attended, num_bytes, random_matrix
from bench.gpu_timing import cold_copies, copy_bandwidth, matmul_rate, time_ms
from bench.gpu_values import Case, Line, Setting
from worker.batch import TokenClass
from worker.kernels.triton.configs import linear_config
from worker.kernels.triton.linear import linear
from worker.kernels.triton.paged_attention import paged_attention, workspace_floats
from worker.kernels.triton.targets import TARGETS, target_of

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
"""Of Llama-3-8B."""
LEAST_SHARE = 0.75
"""Of the bandwidth of a copy, that decode attention must reach."""
JUDGED = ((16, 4096), (1, 32768))
SCANNED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SCANNED_CONTEXT = 4096
CLIFF = 0.75
"""Of the best bandwidth with fewer rows, that more rows must reach."""
SHAPES = ((6144, 4096), (4096, 14336), (128256, 4096), (2560, 2048), (2048, 5632))
"""q, k and v together, down projection and head of Llama-3-8B; two of TinyLlama."""
KINDS = ("bfloat16", "q8_0", "q4_0")
PRODUCT_ROWS = (1, 16, 64)
PREFILL_TOKENS = 2048


def cases(setting: Setting) -> list[Case]:
    """Attention, then products."""
    bench = _Bench(setting)
    judged, scanned = (JUDGED, SCANNED_ROWS) if not setting.is_tiny else (((2, 70),), (1, 3))
    found = [
        Case(f"attention, {rows} rows of {context}", partial(bench.judged_attention, rows, context))
        for rows, context in judged
    ]
    found.append(Case(f"attention, {scanned[0]} to {scanned[-1]} rows", partial(bench.scan, scanned)))
    tokens = 40 if setting.is_tiny else PREFILL_TOKENS
    found.append(Case(f"attention, prefill of {tokens}", partial(bench.prefill_attention, tokens)))
    shapes, kinds = (((96, 64),), ("float32", "q8_0")) if setting.is_tiny else (SHAPES, KINDS)
    for shape in shapes:
        for kind in kinds if shape == shapes[0] else kinds[:1]:
            name = f"product {kind} N={shape[0]} K={shape[1]}"
            of_class = [(f"{rows} rows", rows, TokenClass.DECODE) for rows in PRODUCT_ROWS]
            for what, rows, token_class in (
                *of_class[: 2 if setting.is_tiny else None],
                (f"prefill of {tokens}", tokens, TokenClass.PREFILL),
            ):
                label = f"{name}, {what}"
                run = partial(bench.product, label, kind, shape, rows, token_class)
                found.append(Case(label, run, _config(setting, kind, shape, token_class)))
    return found


def _config(setting: Setting, kind: str, shape: tuple[int, int], token_class: TokenClass) -> str:
    if not setting.is_dry:
        return ""
    found = linear_config(TARGETS["sm_90"], token_class, num_outputs=shape[0], num_inputs=shape[1], kind=kind)
    return (
        f"tiles {found.block_m} x {found.block_n} x {found.block_k}, {found.num_warps} warps, "
        f"{found.num_stages} stages, {found.splits} splits"
    )


class _Bench:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._device = torch.device(setting.device)
        self._dtype = torch.float32 if setting.is_tiny else torch.bfloat16
        self._heads = (4, 2, 16) if setting.is_tiny else (HEADS, KV_HEADS, HEAD_SIZE)

    @cached_property
    def bandwidth(self) -> float:
        return copy_bandwidth(self._device)

    @cached_property
    def rate(self) -> float:
        return matmul_rate(self._device)

    def _floor_ms(self, moved: int, operations: int) -> float:
        return max(moved / self.bandwidth, operations / self.rate) * 1e3

    def attention_ms(
        self, rows: list[tuple[int, int]], token_class: TokenClass, copies: int
    ) -> tuple[float, float, float]:
        """Of attention, of torch's over dense keys and values, and the largest difference between the two."""
        num_heads, num_kv_heads, head_size = self._heads
        given = attended(
            rows,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=self._dtype,
            device=self._device,
            num_layers=copies,
        )
        most = max(MAX_CONTEXT, *(context for context, _ in rows))
        q = torch.randn(given.num_tokens, num_heads * head_size, device=self._device).to(self._dtype)
        out = torch.empty_like(q)
        floats = workspace_floats(
            target_of(self._device),
            token_class,
            num_tokens=given.num_tokens,
            num_rows=len(rows),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            kv_dtype=str(self._dtype).removeprefix("torch."),
            max_context_tokens=most,
        )
        workspace = torch.empty(floats, device=self._device)

        def attend(layer: int) -> Tensor:
            return paged_attention(
                q,
                *given.arguments(layer),
                head_size**-0.5,
                token_class=token_class,
                max_context_tokens=most,
                workspace=workspace,
                out=out,
            )

        if self._setting.compiles_alone:
            attend(0)
            return 1.0, 1.0, 0.0
        mine = time_ms([partial(attend, layer) for layer in range(copies)], device=self._device)
        calls, expected = self._sdpa(q, given.arguments(0), rows, copies)
        theirs = time_ms(calls, device=self._device)
        return mine, theirs, float((attend(0).float() - expected.float()).abs().max())

    def _sdpa(
        self, q: Tensor, paged: tuple[Tensor, ...], rows: list[tuple[int, int]], copies: int
    ) -> tuple[list[Callable[[], Tensor]], Tensor]:
        """Calls of torch's attention over rows of equal lengths, and its result, rows one after the other."""
        num_heads, _, head_size = self._heads
        context, count = rows[0]
        keys, values = (
            cache[paged[2]].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for cache in paged[:2]
        )
        queries = q.view(len(rows), count, num_heads, head_size).transpose(1, 2)
        pairs = [(keys, values), *((keys.clone(), values.clone()) for _ in range(copies - 1))]
        calls: list[Callable[[], Tensor]] = [
            partial(F.scaled_dot_product_attention, queries, k, v, is_causal=count > 1, enable_gqa=True)
            for k, v in pairs
        ]
        return calls, calls[0]().transpose(1, 2).reshape(q.shape)

    def _kv_bytes(self, tokens: int) -> int:
        return 2 * tokens * self._heads[1] * self._heads[2] * self._dtype.itemsize

    def _decode_attention(self, num_rows: int, context: int) -> tuple[Line, float]:
        moved = self._kv_bytes(num_rows * context)
        copies = 1 if self._setting.compiles_alone else cold_copies(moved, device=self._device)
        mine, theirs, difference = self.attention_ms([(context, 1)] * num_rows, TokenClass.DECODE, copies)
        floor = self._floor_ms(moved, 4 * num_rows * context * self._heads[0] * self._heads[2])
        note = f"torch's {theirs:.4g} ms, {theirs / mine:.2f} times; difference {difference:.1e}"
        return Line(f"attention, {num_rows} rows of {context}", mine, "ms", floor, note=note), moved / mine

    def judged_attention(self, num_rows: int, context: int) -> Iterator[Line]:
        """One point, which must reach its share."""
        line, _ = self._decode_attention(num_rows, context)
        passed = (line.share or 0.0) >= LEAST_SHARE if self._setting.judges_speed else None
        yield Line(line.name, line.value, line.unit, line.floor, passed, line.note)

    def scan(self, scanned: tuple[int, ...]) -> Iterator[Line]:
        """No number of rows may be much slower per byte than a smaller one."""
        best, cliffs = 0.0, []
        for num_rows in scanned:
            line, speed = self._decode_attention(num_rows, 40 if self._setting.is_tiny else SCANNED_CONTEXT)
            yield line
            if speed < CLIFF * best:
                cliffs.append(f"{num_rows} rows at {speed / best:.0%} of the best before")
            best = max(best, speed)
        passed = not cliffs if self._setting.judges_speed else None
        yield Line(f"no cliff, {scanned[0]} to {scanned[-1]} rows", passed=passed, note=", ".join(cliffs))

    def prefill_attention(self, tokens: int) -> Iterator[Line]:
        """One row of input."""
        copies = 1 if self._setting.is_tiny else 2
        mine, theirs, difference = self.attention_ms([(tokens, tokens)], TokenClass.PREFILL, copies)
        operations = 2 * tokens * (tokens + 1) * self._heads[0] * self._heads[2]
        floor = self._floor_ms(self._kv_bytes(tokens), operations)
        note = f"torch's {theirs:.4g} ms, {theirs / mine:.2f} times; difference {difference:.1e}"
        yield Line(f"attention, prefill of {tokens}", mine, "ms", floor, note=note)

    def product(
        self, label: str, kind: str, shape: tuple[int, int], rows: int, token_class: TokenClass
    ) -> Iterator[Line]:
        """A product and, with the weight in bfloat16, torch's."""
        first = random_matrix(kind, shape, device=self._device)
        copies = 1 if self._setting.compiles_alone else cold_copies(num_bytes(first), device=self._device)
        weights = [first, *(random_matrix(kind, shape, device=self._device) for _ in range(copies - 1))]
        x = torch.randn(rows, shape[1], device=self._device).to(self._dtype)
        target = target_of(self._device)
        config = linear_config(target, token_class, num_outputs=shape[0], num_inputs=shape[1], kind=kind)
        planes = () if config.splits == 1 else (config.splits,)
        out = torch.empty(*planes, rows, shape[0], device=self._device)
        calls = [partial(linear, x, weight, token_class=token_class, out=out) for weight in weights]
        if self._setting.compiles_alone:
            calls[0]()
            return
        mine = time_ms(calls, device=self._device)
        moved = num_bytes(first) + x.nbytes + out.nbytes
        floor = self._floor_ms(moved, 2 * rows * shape[0] * shape[1])
        note = f"{config.splits} splits"
        if isinstance(first, Tensor):
            plain = torch.empty(rows, shape[0], dtype=first.dtype, device=self._device)
            theirs = time_ms(
                [partial(torch.mm, x, w.T, out=plain) for w in weights if isinstance(w, Tensor)],
                device=self._device,
            )
            note += f"; torch's {theirs:.4g} ms, {theirs / mine:.2f} times"
        yield Line(label, mine, "ms", floor, note=note)
