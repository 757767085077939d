"""How kernels are cut on each target: one table, a reason for every line. Nothing is tuned while serving.

A row's bits are those of its class: within one class (decode, prefill) tile, instruction shape and order of
additions are fixed for a weight's shape, whatever the batch.
"""

from dataclasses import dataclass, replace

from worker.batch import TokenClass
from worker.kernels.triton.targets import Target


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Of `linear` and `linear_swiglu`.

    Attributes:
        block_m: Tokens of a tile.
        block_n: Outputs of a tile.
        block_k: Elements that are added in one matrix instruction sequence; the order of additions.
        num_warps: Warps of a program.
        num_stages: Loads in flight.
        splits: Parts of K that are computed apart and added by whoever reads the product, in ascending order.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Of `paged_attention`.

    Attributes:
        block_m: (query, head of the group) pairs of a tile, at least.
        block_n: Tokens of KV that are attended at once.
        span_tokens: Least tokens of the spans that the context is cut into.
        num_warps: Warps of a program.
        num_stages: Loads in flight.
    """

    block_m: int
    block_n: int
    span_tokens: int
    num_warps: int
    num_stages: int


_LINEAR = {
    # Few tokens. 64 rows of weights fill an instruction and 16 tokens are the fewest of a tile; four such
    # tiles share one pass over the weights. Blocks of 128 read whole lines of memory (256 bytes of bfloat16),
    # and three stages ahead keep 48 KiB in flight on a multiprocessor, near what 4.8 TB/s times memory's
    # latency (some 0.8 us) asks of each. Quants take the arithmetic units longer than an instruction of 32
    # tokens takes the matrix unit, so their tiles are of 32; a block is a span of 64 bytes a row, so more of
    # them are ahead: as many as compile in seconds.
    ("sm_90", TokenClass.DECODE, "half"): LinearConfig(16, 64, 128, 4, 4),
    ("sm_90", TokenClass.DECODE, "q4"): LinearConfig(32, 64, 128, 4, 5),
    ("sm_90", TokenClass.DECODE, "q8"): LinearConfig(32, 64, 64, 4, 8),
    # Many tokens. Two warp groups, each with an instruction of 64 x 128; a block of 64 is the widest swizzle
    # of shared memory (128 bytes), and four stages take 128 KiB of it.
    ("sm_90", TokenClass.PREFILL, "half"): LinearConfig(128, 128, 64, 8, 4),
    ("sm_90", TokenClass.PREFILL, "q4"): LinearConfig(128, 128, 128, 8, 3),
    ("sm_90", TokenClass.PREFILL, "q8"): LinearConfig(128, 128, 64, 8, 3),
    # As sm_90; sums are in tensor memory, and what is dequantised goes there as well. Triton 3.7.1 makes an
    # empty kernel of groups that are dequantised beside two sums of 128 x 128: their tiles are smaller.
    ("sm_100", TokenClass.DECODE, "half"): LinearConfig(16, 64, 128, 4, 4),
    ("sm_100", TokenClass.DECODE, "q4"): LinearConfig(32, 64, 128, 4, 5),
    ("sm_100", TokenClass.DECODE, "q8"): LinearConfig(32, 64, 64, 4, 8),
    ("sm_100", TokenClass.PREFILL, "half"): LinearConfig(128, 128, 64, 8, 4),
    ("sm_100", TokenClass.PREFILL, "q4"): LinearConfig(64, 64, 128, 4, 3),
    ("sm_100", TokenClass.PREFILL, "q8"): LinearConfig(64, 64, 64, 4, 3),
    # 2 TB/s over 108 multiprocessors want a third of the bytes in flight, and there is less shared memory.
    ("sm_80", TokenClass.DECODE, "half"): LinearConfig(16, 64, 128, 4, 3),
    ("sm_80", TokenClass.DECODE, "q4"): LinearConfig(32, 64, 128, 4, 4),
    ("sm_80", TokenClass.DECODE, "q8"): LinearConfig(32, 64, 64, 4, 6),
    # Two sums of 128 x 128 over eight warps leave registers for fragments of both operands, but not
    # for quants beside them.
    ("sm_80", TokenClass.PREFILL, "half"): LinearConfig(128, 128, 32, 8, 3),
    ("sm_80", TokenClass.PREFILL, "q4"): LinearConfig(64, 128, 128, 8, 3),
    ("sm_80", TokenClass.PREFILL, "q8"): LinearConfig(64, 128, 64, 8, 3),
    # Loads pass through registers, so stages are few; 64 KiB of shared memory for all programs of a unit.
    ("gfx942", TokenClass.DECODE, "half"): LinearConfig(16, 64, 64, 4, 2),
    ("gfx942", TokenClass.DECODE, "q4"): LinearConfig(32, 64, 128, 4, 2),
    ("gfx942", TokenClass.DECODE, "q8"): LinearConfig(32, 64, 64, 4, 2),
    ("gfx942", TokenClass.PREFILL, "half"): LinearConfig(128, 128, 32, 8, 2),
    ("gfx942", TokenClass.PREFILL, "q4"): LinearConfig(64, 128, 128, 8, 2),
    ("gfx942", TokenClass.PREFILL, "q8"): LinearConfig(128, 128, 64, 8, 2),
}
_FLOAT32 = {
    # No matrix unit multiplies float32 as it is, but on AMD: fused multiply-adds, fed from registers.
    TokenClass.DECODE: LinearConfig(16, 32, 32, 4, 2),
    TokenClass.PREFILL: LinearConfig(32, 64, 32, 4, 2),
}
_INTERPRETED = {
    # A program costs some 6 ms whatever its size: tiles as wide as a tiny model's weights.
    TokenClass.DECODE: LinearConfig(16, 128, 64, 4, 1),
    TokenClass.PREFILL: LinearConfig(32, 128, 64, 4, 1),
}
_MAX_SPLITS = 8
_MIN_SPLIT_INPUTS = 512
"""Shorter parts of K would end before their loads have filled the stages."""


def linear_config(
    target: Target, token_class: TokenClass, *, num_outputs: int, num_inputs: int, kind: str
) -> LinearConfig:
    """The config of a product with a weight [num_outputs, num_inputs].

    Args:
        target: Where it runs.
        token_class: Of the tokens.
        num_outputs: N, of all stacked parts.
        num_inputs: K.
        kind: `float32`, `float16`, `bfloat16`, `q8_0`, `q4_0` or `q4_1`.
    """
    family = kind[:2] if kind.startswith("q") else "half"
    if target.backend == "interpreter":
        config = replace(_INTERPRETED[token_class], block_k=128 if family == "q4" else 64)
        # In two wherever it can be, so that those who add planes are run as on a GPU.
        splits = 2 if num_inputs % (2 * config.block_k) == 0 else 1
    else:
        is_float32 = kind == "float32"
        config = _FLOAT32[token_class] if is_float32 else _LINEAR[target.name, token_class, family]
        if is_float32 and target.name == "sm_100" and token_class is TokenClass.DECODE:
            # Four tiles of tokens spill with two stages here, and with three on sm_90.
            config = replace(config, num_stages=3)
        splits = _splits(target, config, num_outputs, num_inputs)
    return replace(config, splits=splits) if token_class is TokenClass.DECODE else config


def _splits(target: Target, config: LinearConfig, num_outputs: int, num_inputs: int) -> int:
    """The fewest parts of K, a power of two, that give nine of ten multiprocessors a program at one token.

    Parts are whole blocks of K and are no shorter than `_MIN_SPLIT_INPUTS`.
    """
    tiles = -(-num_outputs // config.block_n)
    splits = 1
    while (
        tiles * splits < 0.9 * target.num_sms
        and splits < _MAX_SPLITS
        and num_inputs % (2 * splits * config.block_k) == 0
        and num_inputs >= 2 * splits * _MIN_SPLIT_INPUTS
    ):
        splits *= 2
    return splits


_ATTENTION = {
    # The smallest instruction, m16n8k16, for decode: a token has as many rows as its group has heads. Two
    # blocks of 64 tokens in flight, 64 KB at heads of 128, and two programs beside each other keep the
    # memory busy; 5 stages, since the look-up of a block's place takes two. Spans of 512 cut 32,768 tokens
    # in 64. Prefill has the largest tile that leaves nothing in local memory; on sm_80 q is in registers too.
    "sm_80": (AttentionConfig(16, 64, 512, 4, 5), AttentionConfig(64, 64, 2048, 8, 5)),
    # Two warp groups with wgmma m64n64k16 each; with 128 tokens at once registers spill.
    "sm_90": (AttentionConfig(16, 64, 512, 4, 5), AttentionConfig(128, 64, 2048, 8, 5)),
    # As sm_90, by tcgen05, with fewer stages: registers hold their addresses.
    "sm_100": (AttentionConfig(16, 64, 512, 4, 5), AttentionConfig(128, 64, 2048, 8, 3)),
    # 64 KB of shared memory hold two stages; 64 tokens at once spill in prefill.
    "gfx942": (AttentionConfig(16, 64, 512, 4, 2), AttentionConfig(128, 32, 2048, 8, 2)),
    # Few, large operations: each costs the same whatever its size.
    "interpreter": (AttentionConfig(16, 64, 256, 1, 1), AttentionConfig(16, 64, 512, 1, 1)),
}
"""Decode, prefill; for heads up to 128 and two bytes or less an element."""


def attention_config(
    target: Target, token_class: TokenClass, *, head_size: int, kv_dtype: str
) -> AttentionConfig:
    """The config of attention over heads of a size.

    Args:
        target: Where it runs.
        token_class: Of the tokens.
        head_size: Width of a head.
        kv_dtype: `float32`, `float16`, `bfloat16` or `float8_e4m3fn`.
    """
    decode, prefill = _ATTENTION[target.name]
    is_decode = token_class is TokenClass.DECODE
    config = decode if is_decode else prefill
    if target.backend == "interpreter":
        return config
    if kv_dtype == "float32":
        # Without TF32 there are no matrix units to fill on CUDA, and registers hold small tiles only.
        return replace(config, block_m=16, block_n=16, num_warps=4, num_stages=2)
    is_fp8 = kv_dtype == "float8_e4m3fn"
    if is_fp8 and not is_decode:
        # Widening float8 takes registers: with 128 rows of scores or the most stages none are left.
        if target.name == "sm_80":
            config = replace(config, num_stages=4)
        elif target.name == "sm_100":
            config = replace(config, block_m=64)
    if target.name == "gfx942" and not is_decode and (is_fp8 or head_size <= 64):
        # Keys of few bytes: so few warps that a thread has 16 of them, and a tile that scalars suffice for.
        if not is_fp8:
            config = replace(config, block_m=64, num_warps=4)
        elif head_size <= 64:
            config = replace(config, block_m=32, block_n=32, num_warps=2)
        else:
            config = replace(config, block_m=64, block_n=64, num_warps=4)
    if is_decode and (head_size > 128 or head_size & (head_size - 1)):
        # Wide heads' addresses, and masks of those that are padded, take registers of a stage.
        config = replace(config, num_stages=min(config.num_stages, 4))
    if head_size > 128:
        # Twice the width: half the tokens at once, and in prefill half the queries.
        block_n = 16 if target.backend == "hip" and not is_decode else 32
        return replace(config, block_m=min(config.block_m, 64), block_n=block_n)
    return config
