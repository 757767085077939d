"""Operators of the decode step: schemas, fakes for tracing, and the table that picks implementations.

Called with tensors an operator runs its plain reference; called with traced values it becomes a node of
the graph, and the plan's lowering asks `implementations` what to launch for it. Shapes, dtypes and
formulas stand at the references. Nothing here imports triton: a plan imports what it launches.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import ParamSpec, cast

import torch
from torch import Tensor

from worker.kernels.reference import add as _add
from worker.kernels.reference import embedding as _embedding
from worker.kernels.reference import linear as _linear
from worker.kernels.reference import paged_attention as _paged_attention
from worker.kernels.reference import rms_norm as _rms_norm
from worker.kernels.reference import rope_store as _rope_store
from worker.kernels.reference import select_rows as _select_rows
from worker.kernels.reference import swiglu as _swiglu

P = ParamSpec("P")
Implementation = Callable[..., Tensor]

_REFERENCE = {
    f"pagecast.{name}": f"worker.kernels.reference.{name}:{name}"
    for name in (
        "embedding",
        "rms_norm",
        "linear",
        "rope_store",
        "paged_attention",
        "swiglu",
        "add",
        "select_rows",
    )
}
_TABLE = {
    "reference": _REFERENCE,
    "triton": _REFERENCE
    | {"pagecast.paged_attention": "worker.kernels.triton.paged_attention:paged_attention"},
}
KERNELS = tuple(_TABLE)
"""Names that choose an implementation of every operator."""


def implementations(kernels: str) -> Mapping[str, Implementation]:
    """Imports and returns what runs each operator, by its qualified name such as `pagecast.linear`.

    Args:
        kernels: One of `KERNELS`. `triton` without a GPU needs `worker.kernels.triton.prepare_triton()`
            to have been called before anything imported triton.

    Raises:
        ValueError: `kernels` is unknown.
        RuntimeError: Triton's kernels can't run in this process as it was prepared.
    """
    if kernels not in _TABLE:
        raise ValueError(f"kernels={kernels!r} is none of {', '.join(KERNELS)}")
    found = {}
    for operator, place in _TABLE[kernels].items():
        module, _, name = place.partition(":")
        found[operator] = getattr(import_module(module), name)
    return found


def _operator(
    fake: Implementation, mutates: Iterable[str] = ()
) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Registers a function as the operator `pagecast.<its name>` with the schema of its signature."""

    def register(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
        operator = torch.library.custom_op(f"pagecast::{function.__name__}", function, mutates_args=mutates)
        operator.register_fake(fake)
        return cast("Callable[P, Tensor]", operator)

    return register


@_operator(fake=lambda weight, token_ids: weight.new_empty(token_ids.shape[0], weight.shape[1]))
def embedding(weight: Tensor, token_ids: Tensor) -> Tensor:
    """One row of `weight` per token."""
    return _embedding.embedding(weight, token_ids)


@_operator(fake=lambda x, index: x.new_empty(index.shape[0], x.shape[1]))
def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows of `x` that logits are wanted for."""
    return _select_rows.select_rows(x, index)


@_operator(fake=lambda x, *_: torch.empty_like(x))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row over its root mean square, times `weight`."""
    return _rms_norm.rms_norm(x, weight, eps)


@_operator(fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`."""
    return _linear.linear(x, weight)


@_operator(fake=lambda x, _: torch.empty_like(x))
def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y`."""
    return _add.add(x, y)


@_operator(fake=lambda gate, _: torch.empty_like(gate))
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return _swiglu.swiglu(gate, up)


@_operator(fake=lambda q, *_: torch.empty_like(q), mutates=("key_cache", "value_cache"))
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
    """Rotates q and k, stores k and v in their slots, returns q."""
    return _rope_store.rope_store(q, k, v, position, slot_mapping, cos, sin, key_cache, value_cache)


@_operator(fake=lambda q, *_: torch.empty_like(q))
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
