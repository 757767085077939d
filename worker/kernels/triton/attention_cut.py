"""How a call of paged attention is cut into tiles, spans and programs, and the constants of its kernels."""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from worker.kernels.triton.attention_merge import UNROLL
from worker.kernels.triton.configs import AttentionConfig
from worker.kernels.triton.targets import Target

MAX_SPANS = 256
"""Of the longest context; spans get longer before there are more."""
WAVES = 8
"""Programs per multiprocessor that are enough: those side by side, and some more for rows of other length."""
KV_DTYPES = {
    "float32": tl.float32,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float8_e4m3fn": tl.float16,
}
"""Of the cache, and the type that its products are made in."""


@dataclass(frozen=True, slots=True)
class AttentionCut:
    """How a call is cut. What a token's bits depend on is the same for every call of a class and plan.

    Attributes:
        block_m: (query, head of the group) pairs of a tile; fixed by the class.
        tile_queries: Queries of a tile; fixed by the class.
        span_tokens: Tokens of a span; fixed by the class and the longest context.
        num_spans: Spans of the longest context.
        num_tiles: Tiles of the grid. No bits depend on it.
        num_programs: Programs that share a tile's spans. No bits depend on it.
    """

    block_m: int
    tile_queries: int
    span_tokens: int
    num_spans: int
    num_tiles: int
    num_programs: int

    @property
    def num_planes(self) -> int:
        """Pieces that a (token, head) has room for in the workspace.

        Of every span, or, where one program folds them as they come, the sums so far and the piece at hand.
        """
        if self.num_programs > 1:
            return self.num_spans
        return 2 if self.num_spans > 1 else 0

    def workspace_floats(self, *, num_tokens: int, num_heads: int, head_size: int) -> int:
        """Size of the workspace: weighted values, maximum and sum of each (plane, token, head)."""
        return self.num_planes * num_tokens * num_heads * (head_size + 2)


def attention_cut(
    config: AttentionConfig,
    *,
    num_tokens: int,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    max_context_tokens: int,
    num_sms: int,
    num_programs: int | None = None,
) -> AttentionCut:
    """Cuts a call.

    Args:
        config: Of target and class.
        num_tokens: T, padding included.
        num_rows: R, padding included.
        num_heads: Of q.
        num_kv_heads: Of the cache.
        max_context_tokens: Longest context of any row of any call.
        num_sms: Multiprocessors of the device.
        num_programs: Instead of as many as fill the device.
    """
    group = num_heads // num_kv_heads
    block_m = max(config.block_m, triton.next_power_of_2(group))
    tile_queries = block_m // group
    span_tokens = max(config.span_tokens, triton.next_power_of_2(-(-max_context_tokens // MAX_SPANS)))
    num_spans = max(1, -(-max_context_tokens // span_tokens))
    num_tiles = num_tokens // tile_queries + num_rows
    if num_programs is None:
        num_programs = WAVES * num_sms // max(1, num_tiles * num_kv_heads)
    return AttentionCut(
        block_m=block_m,
        tile_queries=tile_queries,
        span_tokens=span_tokens,
        num_spans=num_spans,
        num_tiles=num_tiles,
        num_programs=max(1, min(num_programs, num_spans)),
    )


def span_constants(
    config: AttentionConfig,
    cut: AttentionCut,
    target: Target,
    *,
    block_size: int,
    head_size: int,
    group: int,
    kv_dtype: str,
    soft_cap: bool,
    window: bool,
) -> dict[str, Any]:
    """Compile-time arguments of `attend_spans_kernel`."""
    # Triton's interpreter multiplies no bfloat16.
    is_upcast = target.backend == "interpreter" and kv_dtype == "bfloat16"
    parts = 2 if kv_dtype == "float8_e4m3fn" else 1
    return {
        "BLOCK_SIZE": block_size,
        "HEAD_SIZE": head_size,
        "GROUP": group,
        "TILE_QUERIES": cut.tile_queries,
        "SPAN_TOKENS": cut.span_tokens,
        "BLOCK_M": cut.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": max(16 * parts, triton.next_power_of_2(head_size)),
        "COMPUTE": tl.float32 if is_upcast else KV_DTYPES[kv_dtype],
        "PARTS": parts,
        "SOFT_CAP": soft_cap,
        "WINDOW": window,
        "FUSED": target.backend != "interpreter",
    }


def merge_constants(spans: dict[str, Any]) -> dict[str, Any]:
    """Compile-time arguments of `merge_spans_kernel`, from those of `attend_spans_kernel`."""
    names = ("HEAD_SIZE", "BLOCK_D", "GROUP", "SPAN_TOKENS", "WINDOW", "FUSED")
    return {name: spans[name] for name in names} | {"UNROLL": UNROLL if spans["FUSED"] else 1}
