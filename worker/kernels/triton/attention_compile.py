"""What of paged attention is compiled for a target without a device, from the launcher's own constants."""

from dataclasses import dataclass

from worker.batch import TokenClass
from worker.kernels.triton.attention_cut import attention_cut, merge_constants, span_constants
from worker.kernels.triton.attention_merge import merge_spans_kernel
from worker.kernels.triton.attention_spans import attend_spans_kernel
from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.configs import attention_config
from worker.kernels.triton.targets import Target

_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "u16"}
_MATRIX = {
    "sm_80": ("mma.sync.aligned.m16n8k16", "mma.sync.aligned.m16n8k16"),
    "sm_90": ("mma.sync.aligned.m16n8k16", "wgmma.mma_async.sync.aligned.m64n"),
    "sm_100": ("mma.sync.aligned.m16n8k16", "tcgen05.mma"),
    "gfx942": ("v_mfma_f32_16x16x16", "v_mfma_f32_32x32x8"),
}
"""Decode, prefill."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Heads and blocks of a model, and what its attention has beside."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    kv_dtype: str
    block_size: int = 16
    soft_cap: bool = False
    window: bool = False


_SHAPES = (
    *(_Shape("Llama-3-8B", 32, 8, 128, kv) for kv in _TYPES),
    *(_Shape("TinyLlama-1.1B", 32, 4, 64, kv) for kv in _TYPES),
    _Shape("80 wide, capped", 32, 32, 80, "float16", 32, soft_cap=True),
    _Shape("96 wide", 32, 32, 96, "bfloat16", 256),
    _Shape("256 wide, window", 16, 8, 256, "bfloat16", 64, soft_cap=True, window=True),
    _Shape("Llama-3-8B, window", 32, 8, 128, "bfloat16", 128, window=True),
)


def attention_cases(target: Target) -> list[CompileCase]:
    """Both kernels, both classes, every dtype of the cache, head sizes 64 to 256, block sizes 16 to 256."""
    cases = []
    for shape in _SHAPES:
        for token_class in TokenClass:
            cases += _cases(target, shape, token_class)
    return cases


def _cases(target: Target, shape: _Shape, token_class: TokenClass) -> list[CompileCase]:
    """The kernel over spans of a shape and class, and the merge behind it."""
    config = attention_config(target, token_class, head_size=shape.head_size, kv_dtype=shape.kv_dtype)
    cut = attention_cut(
        config,
        num_tokens=16,
        num_rows=16,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        max_context_tokens=32768,
        num_sms=target.num_sms,
    )
    constants = span_constants(
        config,
        cut,
        target,
        block_size=shape.block_size,
        head_size=shape.head_size,
        group=shape.num_heads // shape.num_kv_heads,
        kv_dtype=shape.kv_dtype,
        soft_cap=shape.soft_cap,
        window=shape.window,
    )
    is_fp8 = shape.kv_dtype == "float8_e4m3fn"
    cache = "*" + _TYPES[shape.kv_dtype]
    q = "*" + {"float32": "fp32", "float16": "fp16"}.get(shape.kv_dtype, "bf16")
    kinds = dict.fromkeys(("workspace_ptr", "key_scale_ptr", "value_scale_ptr"), "*fp32")
    kinds |= {"q_ptr": q, "out_ptr": q, "key_ptr": cache, "value_ptr": cache}
    kinds |= dict.fromkeys(("block_table_ptr", "context_len_ptr", "query_start_ptr"), "*i32")
    kinds |= dict.fromkeys(("cap_factor", "factor", "value_factor"), "fp32")
    scales = {} if is_fp8 else {"key_scale_ptr": None, "value_scale_ptr": None}
    is_decode = token_class is TokenClass.DECODE
    matrix = _MATRIX[target.name][0 if is_decode else 1]
    if target.backend == "hip" and config.block_n == 16:
        # Scores of 16 tokens by 16x16x16, and their products with wide heads by 32x32x8.
        matrix = "v_mfma_f32_"
    if shape.kv_dtype == "float32":
        matrix = "v_mfma_f32_16x16x4" if target.backend == "hip" else ""
    cases = []
    for kernel, sizes, warps, stages, wide, instruction in (
        (
            attend_spans_kernel,
            constants | scales | {"key_dim_stride": 1, "value_dim_stride": 1},
            config.num_warps,
            config.num_stages,
            frozenset(("key_ptr", "value_ptr")),
            matrix,
        ),
        (merge_spans_kernel, merge_constants(constants) | scales, 1, 1, frozenset[str](), ""),
    ):
        names = kernel.arg_names
        taken = {name: value for name, value in sizes.items() if name in names}
        cases.append(
            CompileCase(
                op="paged_attention",
                label=f"{kernel.__name__} {token_class.value} {shape.name} {shape.kv_dtype}",
                target=target,
                kernel=kernel,
                signature={name: kinds.get(name, "i32") for name in names if name not in taken},
                constants=taken,
                divisible=frozenset(
                    name
                    for name in names
                    if name not in taken
                    and (name.endswith(("_ptr", "_stride")) or name == "num_heads")
                    and name != "block_table_stride"
                ),
                num_warps=warps,
                num_stages=stages,
                is_named=shape.name == "Llama-3-8B" and shape.kv_dtype in ("bfloat16", "float8_e4m3fn"),
                wide=wide,
                matrix=instruction,
            )
        )
    return cases
