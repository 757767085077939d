"""Section: every kernel against its plain twin in float64, over small odd shapes.

The twin is given what a kernel multiplies: factors rounded to the dtype of the product. What is left is the
order of additions, and in attention the rounding of weights.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu_draws import draw_cases
from bench.gpu_operands import DTYPES, attended, dense, random_matrix
from bench.gpu_values import Case, Line, Setting
from worker.batch import TokenClass
from worker.kernels.quantised import QuantisedMatrix
from worker.kernels.reference.add import add as plain_add
from worker.kernels.reference.add_rms_norm import add_rms_norm as plain_add_rms_norm
from worker.kernels.reference.paged_attention import paged_attention as plain_attention
from worker.kernels.reference.rms_norm import rms_norm as plain_rms_norm
from worker.kernels.reference.rope_store import rope_store as plain_rope_store
from worker.kernels.reference.swiglu import swiglu as plain_swiglu
from worker.kernels.triton.add import add
from worker.kernels.triton.add_rms_norm import add_rms_norm
from worker.kernels.triton.embedding import embedding
from worker.kernels.triton.linear import linear
from worker.kernels.triton.linear_swiglu import linear_swiglu
from worker.kernels.triton.paged_attention import paged_attention
from worker.kernels.triton.rms_norm import rms_norm
from worker.kernels.triton.rope_store import rope_store
from worker.kernels.triton.select_rows import select_rows
from worker.kernels.triton.swiglu import swiglu

_EXACT = 2e-5
"""Of the largest value: what float32 sums of some thousand terms lose."""
_ROUNDED = {"float32": _EXACT, "float16": 2e-3, "bfloat16": 1.5e-2, "float8_e4m3fn": 2e-3}
"""By the dtype that weights of attention are rounded to."""
_KINDS = ("float32", "float16", "bfloat16", "q8_0", "q4_0", "q4_1")
_KV_DTYPES = {**DTYPES, "float8_e4m3fn": torch.float8_e4m3fn}
_ROWS = [(1, 1), (16, 1), (17, 3), (33, 33), (600, 2), (45, 20)]
"""Of attention: contexts and new tokens."""
_SIZES_OF_ALL_WAYS = (16, 128)
"""Heads that windows and soft caps are tried with: each is a kernel of its own."""
EPS = 1e-5


def cases(setting: Setting) -> list[Case]:
    """Row kernels, products of every kind and class, rope and store, attention of every dtype, draws."""
    device = torch.device(setting.device)
    found = [
        Case("row kernels", partial(_row_kernels, device)),
        Case("embedding", partial(_embedding, device)),
    ]
    # The interpreter has no products of bfloat16.
    kinds = ("float32", "q4_1") if setting.is_tiny else _KINDS
    shape = (70, 96) if setting.is_tiny else (1000, 1120)
    for kind in kinds:
        for token_class in TokenClass:
            label = f"products, {kind}, {token_class.value}"
            tokens = 17 if setting.is_tiny else 77
            found.append(Case(label, partial(_products, device, label, kind, shape, tokens, token_class)))
    kv_dtypes = ("float32", "float8_e4m3fn") if setting.is_tiny else tuple(_KV_DTYPES)
    sizes = (16,) if setting.is_tiny else (64, 80, 128, 256)
    for name in kv_dtypes:
        found.append(Case(f"rope and store, {name}", partial(_rope_store, device, name)))
        for head_size in sizes if name in ("float32", "bfloat16") else sizes[:1]:
            for token_class in TokenClass:
                label = f"attention, {name}, heads of {head_size}, {token_class.value}"
                found.append(Case(label, partial(_attention, device, label, name, head_size, token_class)))
    return found + draw_cases(setting)


def _line(name: str, pairs: Iterable[tuple[Tensor, Tensor]], allowed: float) -> Line:
    """The largest difference of results and what was expected, as part of the largest value expected."""
    worst = 0.0
    for found, expected in pairs:
        largest = max(float(expected.abs().max()), 1e-30)
        difference = float((found.double() - expected).abs().max()) / largest
        worst = difference if not difference <= worst else worst
    return Line(name, worst, "of the largest", passed=worst <= allowed, note=f"allowed {allowed:g}")


def _normal(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def _row_kernels(device: torch.device) -> Iterator[Line]:
    x, gate = (_normal(19, 200, device=device, seed=seed) for seed in range(2))
    planes, weight = _normal(3, 19, 200, device=device, seed=2), _normal(200, device=device, seed=3)
    wide = (x.double(), planes.double(), weight.double())
    index = torch.tensor([18, 0, 7], dtype=torch.int32, device=device)
    results: dict[str, Callable[[], Iterable[tuple[Tensor, Tensor]]]] = {
        "rms_norm": lambda: [(rms_norm(x, weight, EPS), plain_rms_norm(wide[0], wide[2], EPS))],
        "add_rms_norm": lambda: zip(
            add_rms_norm(x, planes, weight, EPS), plain_add_rms_norm(*wide, EPS), strict=True
        ),
        "add": lambda: [(add(x, planes), plain_add(wide[0], wide[1]))],
        "swiglu": lambda: [(swiglu(gate, x), plain_swiglu(gate.double(), wide[0]))],
        "select_rows": lambda: [(select_rows(x, index), wide[0][index.long()])],
    }
    for name, pairs in results.items():
        yield _line(name, pairs(), 1e-5)


def _embedding(device: torch.device) -> Iterator[Line]:
    ids = torch.tensor([3, 0, 69, 3], dtype=torch.int32, device=device)
    for kind in _KINDS:
        weight = random_matrix(kind, (70, 96), device=device)
        yield _line(f"embedding, {kind}", [(embedding(weight, ids), dense(weight)[ids.long()])], 0.0)


def _products(
    device: torch.device,
    label: str,
    kind: str,
    shape: tuple[int, int],
    tokens: int,
    token_class: TokenClass,
) -> Iterator[Line]:
    weight = random_matrix(kind, shape, device=device)
    x = _normal(tokens, shape[1], device=device)
    compute = torch.float32 if device.type == "cpu" else torch.bfloat16
    compute = DTYPES.get(kind, compute)
    rounded, numbers = x.to(compute), dense(weight).to(compute).double()
    sums = rounded.double() @ numbers.T
    named: dict[str, Any] = {"compute": compute} if isinstance(weight, QuantisedMatrix) else {}
    found = linear(x, weight, token_class=token_class, **named)
    yield _line(f"linear: {label}", [(found, sums)], _EXACT)
    gate, up = sums.chunk(2, dim=1)
    # One product rounds by itself, one is given what a plan has rounded already.
    found = linear_swiglu(rounded, weight, token_class=token_class, **named)
    yield _line(f"linear_swiglu: {label}", [(found, plain_swiglu(gate, up))], _EXACT)


def _rope_store(device: torch.device, kv_dtype: str) -> Iterator[Line]:
    heads, kv_heads, size, count = 6, 2, 80, 11
    given = attended(
        [(40, count)], num_kv_heads=kv_heads, head_size=size, dtype=_KV_DTYPES[kv_dtype], device=device
    )
    q, k, v = (_normal(count, n * size, device=device, seed=n) for n in (heads, kv_heads, kv_heads))
    position = torch.arange(29, 40, dtype=torch.int32, device=device)
    angles = _normal(64, size // 2, device=device, seed=9)
    table = given.block_table[0].long()
    slots = table[position.long() // 16] * 16 + position.long() % 16
    keys, values, *_ = given.arguments(0)
    plain_keys, plain_values = (torch.zeros_like(cache, dtype=torch.float64) for cache in (keys, values))
    cos, sin = angles.cos(), angles.sin()
    expected = plain_rope_store(
        q.double(),
        k.double(),
        v.double(),
        position,
        slots,
        cos.double(),
        sin.double(),
        plain_keys,
        plain_values,
    )
    scale = torch.full((kv_heads,), 0.5, device=device)
    scales: dict[str, Any] = {"key_scale": scale, "value_scale": scale} if kv_dtype == "float8_e4m3fn" else {}
    found = rope_store(q, k, v, position, slots, cos, sin, keys, values, **scales)
    yield _line(f"turned q, {kv_dtype}", [(found, expected)], 1e-5)
    factor = 0.5 if scales else 1.0
    stored = [
        (cache.to(torch.float32)[slots // 16, slots % 16] * factor, each[slots // 16, slots % 16])
        for cache, each in ((keys, plain_keys), (values, plain_values))
    ]
    allowed = {"float32": 1e-6, "float16": 6e-4, "bfloat16": 5e-3}.get(kv_dtype, 6.5e-2)
    yield _line(f"stored keys and values, {kv_dtype}", stored, allowed)


def _attention(
    device: torch.device, label: str, kv_dtype: str, head_size: int, token_class: TokenClass
) -> Iterator[Line]:
    heads, kv_heads = 6, 2
    rows = [(context, 1) for context, _ in _ROWS] if token_class is TokenClass.DECODE else _ROWS
    given = attended(
        rows, num_kv_heads=kv_heads, head_size=head_size, dtype=_KV_DTYPES[kv_dtype], device=device
    )
    dtype = DTYPES.get(kv_dtype, torch.float16)
    q = _normal(given.num_tokens, heads * head_size, device=device).to(dtype)
    keys, values, table, context_len, query_start = given.arguments(0)
    scales: dict[str, Any] = {}
    factor = torch.ones(kv_heads, device=device)
    if kv_dtype == "float8_e4m3fn":
        factor = torch.tensor([0.5, 1.25], device=device)
        scales = {"key_scale": factor, "value_scale": factor}
    wide_keys, wide_values = (cache.double() * factor.double()[:, None] for cache in (keys, values))
    scale = head_size**-0.5
    ways: dict[str, dict[str, Any]] = {"": {}}
    if head_size in _SIZES_OF_ALL_WAYS:
        ways |= {", window": {"window": 19}, ", soft cap": {"soft_cap": 3.0}}
    for name, named in ways.items():
        found = paged_attention(
            q,
            keys,
            values,
            table,
            context_len,
            query_start,
            scale,
            token_class=token_class,
            **named,
            **scales,
        )
        expected = plain_attention(
            q.double(), wide_keys, wide_values, table, context_len, query_start, scale, **named
        )
        yield _line(f"{label}{name}", [(found, expected)], _ROUNDED[kv_dtype])
