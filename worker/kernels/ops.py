"""Operators of the decode step: schemas, fakes for tracing, and the table that picks implementations.

Called with tensors an operator runs its plain reference; called with traced values it becomes a node of
the graph. The model's step is written over the first group; the second group is only made by the plan's
passes. Every value is [rows, width] float32; formulas, shapes and sources stand at the references.
Nothing here imports triton: a plan imports what it launches.
"""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from worker.kernels.reference import add as _add
from worker.kernels.reference import add_rms_norm as _add_rms_norm
from worker.kernels.reference import columns as _columns
from worker.kernels.reference import embedding as _embedding
from worker.kernels.reference import linear as _linear
from worker.kernels.reference import linear_swiglu as _linear_swiglu
from worker.kernels.reference import paged_attention as _paged_attention
from worker.kernels.reference import rms_norm as _rms_norm
from worker.kernels.reference import rope as _rope
from worker.kernels.reference import rope_store as _rope_store
from worker.kernels.reference import select_rows as _select_rows
from worker.kernels.reference import store_kv as _store_kv
from worker.kernels.reference import swiglu as _swiglu

P = ParamSpec("P")
R = TypeVar("R")
Implementation = Callable[..., Any]
"""Takes an operator's arguments; returns its tensor, its tuple of tensors, or None if it only stores."""

KERNELS = ("native", "reference", "triton")
"""What can run a plan. Native kernels run whole programs and are not called one by one."""
TRITON_OPERATORS = frozenset(
    (
        *("embedding", "rms_norm", "linear", "paged_attention", "swiglu", "add", "select_rows"),
        *("add_rms_norm", "rope_store", "linear_swiglu"),
    )
)
"""Those that have a Triton kernel. `rope` and `store_kv` are fused before anything is launched, and `columns`
are views."""
_fakes: dict[str, Implementation] = {}
_overloads: dict[str, torch._ops.OpOverload] = {}
_short_names: dict[object, str] = {}
_writing: set[str] = set()


def implementations(kernels: str) -> Mapping[str, Implementation]:
    """Imports and returns what computes each operator, by its short name such as `linear`.

    Args:
        kernels: `reference`, or `triton`: its kernels where there are any, else the references. Without a
            GPU, `triton` needs `worker.kernels.triton.prepare_triton()` before anything imports triton.

    Raises:
        ValueError: `kernels` is unknown, or has no implementations of single operators.
        RuntimeError: Triton's kernels can't run in this process as it was prepared.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} is none of {', '.join(KERNELS)}")
    if kernels == "native":
        raise ValueError("kernels='native' runs whole programs, it has no function for a single operator")
    found = {}
    for name in _fakes:
        package = "triton" if kernels == "triton" and name in TRITON_OPERATORS else "reference"
        found[name] = getattr(import_module(f"worker.kernels.{package}.{name}"), name)
    return found


def overload(name: str) -> torch._ops.OpOverload:
    """The operator of a short name as the graph's nodes call it.

    Raises:
        KeyError: There is no such operator.
    """
    return _overloads[name]


def short_name(target: object) -> str | None:
    """The short name of what a node calls; None if that is none of these operators."""
    return _short_names.get(target)


def writes(name: str) -> bool:
    """Whether an operator, by its short name, writes caches: it matters even if nobody reads its result."""
    return name in _writing


def fake(name: str) -> Implementation:
    """The function that gives the result's shape for meta tensors, without the dispatcher's cost.

    Raises:
        KeyError: There is no such operator.
    """
    return _fakes[name]


def _operator(
    fake: Implementation, mutates: Collection[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers a function as the operator `pagecast::<its name>` with the schema of its signature."""

    def register(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        operator = torch.library.custom_op(f"pagecast::{name}", function, mutates_args=mutates)
        operator.register_fake(fake)
        _fakes[name] = fake
        if mutates:
            _writing.add(name)
        _overloads[name] = getattr(torch.ops.pagecast, name).default
        _short_names[_overloads[name]] = name
        return cast("Callable[P, R]", operator)

    return register


# What the model's step calls.


@_operator(fake=lambda weight, token_ids: weight.new_empty(token_ids.shape[0], weight.shape[1]))
def embedding(weight: Tensor, token_ids: Tensor) -> Tensor:
    """One row of `weight` per token."""
    return _embedding.embedding(weight, token_ids)


@_operator(fake=lambda x, *_: x.new_empty(x.shape))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row over its root mean square, times `weight`."""
    return _rms_norm.rms_norm(x, weight, eps)


@_operator(fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`."""
    return _linear.linear(x, weight)


@_operator(fake=lambda x, *_: x.new_empty(x.shape))
def rope(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every head of `x` turned by its token's position."""
    return _rope.rope(x, position, cos, sin)


@_operator(fake=lambda *_: None, mutates=("key_cache", "value_cache"))
def store_kv(k: Tensor, v: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Writes k and v into their slots of a layer's cache."""
    _store_kv.store_kv(k, v, slot_mapping, key_cache, value_cache)


@_operator(fake=lambda q, *_: q.new_empty(q.shape))
def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    query_start: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of each row's new tokens over its paged context."""
    return _paged_attention.paged_attention(
        q, key_cache, value_cache, block_table, context_len, query_start, scale
    )


@_operator(fake=lambda gate, _: gate.new_empty(gate.shape))
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return _swiglu.swiglu(gate, up)


@_operator(fake=lambda x, _: x.new_empty(x.shape))
def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y`."""
    return _add.add(x, y)


@_operator(fake=lambda x, index: x.new_empty(index.shape[0], x.shape[1]))
def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows of `x` that logits are wanted for."""
    return _select_rows.select_rows(x, index)


# What only passes make.


@_operator(fake=lambda x, start, end: x.new_empty(x.shape[0], end - start))
def columns(x: Tensor, start: int, end: int) -> Tensor:
    """`x[:, start:end]`, copied; a program reads it in place instead."""
    return _columns.columns(x, start, end)


@_operator(fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)))
def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + y`, and its `rms_norm`."""
    return _add_rms_norm.add_rms_norm(x, y, weight, eps)


@_operator(fake=lambda q, *_: q.new_empty(q.shape), mutates=("key_cache", "value_cache"))
def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> Tensor:
    """Turns q and k, stores k and v in their slots, returns q."""
    return _rope_store.rope_store(q, k, v, position, slot_mapping, cos, sin, key_cache, value_cache)


@_operator(fake=lambda x, gate_up: x.new_empty(x.shape[0], gate_up.shape[0] // 2))
def linear_swiglu(x: Tensor, gate_up: Tensor) -> Tensor:
    """`swiglu` of the two halves of `x @ gate_up.T`."""
    return _linear_swiglu.linear_swiglu(x, gate_up)
