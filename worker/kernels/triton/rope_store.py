"""Rotary position embedding and the KV store in Triton, in one launch: launcher and compile cases."""

from typing import Any

import torch
import triton
from torch import Tensor

from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.rope_heads import rope_store_kernel
from worker.kernels.triton.rows import FLOATS, check_rows, check_shape, compile_case, planes_of
from worker.kernels.triton.targets import Target

BLOCK_HEADS = 4
"""Heads of a program: four of 128 are one 16-byte load a thread, and a token still has a dozen programs."""
KV_DTYPES = (*FLOATS, torch.float8_e4m3fn)
_CASES = {"TinyLlama-1.1B": (32, 4, 64), "Llama-3-8B": (32, 8, 128)}


def _constants(
    *, num_heads: int, num_kv_heads: int, head_size: int, block_size: int, planes: int, is_fp8: bool
) -> dict[str, Any]:
    """Compile-time arguments of the kernel, and its warps."""
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_D": triton.next_power_of_2(head_size),
        "PLANES": planes,
        "FP8": is_fp8,
        "num_warps": 4,
    }


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
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Turns q and k by their token's position, stores k and v in their slot, writes q.

    Pairs are interleaved: `x[2i], x[2i+1] = x[2i] c - x[2i+1] s, x[2i] s + x[2i+1] c` with c and s of
    (position, i).

    Moves `T * planes * (width of q + k + v) * (bytes of q)` in, a row of cos and sin per program, q and one
    slot of keys and values per token out.

    Source: Su et al., "RoFormer" (2021), arXiv:2104.09864.

    Args:
        q: [T, num_heads * head_size] of any float dtype, each row dense, or planes [P, T, num_heads *
            head_size] of it, which are added in ascending order, in float32. q, k and v may be columns of one
            value.
        k: [T, num_kv_heads * head_size], or as many planes as q.
        v: As `k`.
        position: [T] int32.
        slot_mapping: [T] int64, no slot twice; of a negative one nothing is stored.
        cos: [max_context, head_size / 2] float32.
        sin: As `cos`.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size] float32, float16, bfloat16 or
            float8_e4m3fn, any strides; written. float8 saturates at 448.
        value_cache: As `key_cache`, of strides of its own; written.
        key_scale: [num_kv_heads] float32, or None: keys are stored divided by it.
        value_scale: As `key_scale`, of values.
        out: [T, num_heads * head_size] of any float dtype, each row dense; default: float32, allocated.

    Returns:
        `out`, the turned q.

    Raises:
        ValueError: An argument has another shape, stride or dtype; names it. Nothing was written.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    num_tokens, width = q.shape[-2:]
    out = q.new_empty((num_tokens, width), dtype=torch.float32) if out is None else out
    _, block_size, num_kv_heads, head_size = key_cache.shape
    check_rows(rope_store_kernel, q=q, k=k, v=v, cos=cos, sin=sin, out=out)
    kv_shape = (*q.shape[:-1], num_kv_heads * head_size)
    check_shape("k", k, kv_shape)
    check_shape("v", v, kv_shape)
    check_shape("out", out, (num_tokens, width))
    check_shape("position", position, (num_tokens,))
    check_shape("slot_mapping", slot_mapping, (num_tokens,))
    check_shape("sin", sin, tuple(cos.shape))
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    _check_dtypes(position, slot_mapping, cos, sin, key_cache, value_cache)
    if head_size % 2 or cos.shape[1] != head_size // 2 or width % head_size:
        raise ValueError(f"q has width {width} and cos {cos.shape[1]}, with heads of {head_size}")
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None:
            check_shape(name, scale, (num_kv_heads,))
    if not num_tokens:
        return out
    is_fp8 = key_cache.dtype == torch.float8_e4m3fn
    if is_fp8:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    num_heads = width // head_size
    sections = triton.cdiv(num_heads, BLOCK_HEADS) + 2 * triton.cdiv(num_kv_heads, BLOCK_HEADS)
    rope_store_kernel[(num_tokens, sections)](
        q,
        k,
        v,
        out,
        position,
        slot_mapping,
        cos,
        sin,
        key_cache,
        value_cache,
        key_scale,
        value_scale,
        q.stride(-2),
        k.stride(-2),
        v.stride(-2),
        *(planes_of(x)[1] for x in (q, k, v)),
        out.stride(0),
        cos.stride(0),
        sin.stride(0),
        *key_cache.stride(),
        *value_cache.stride(),
        **_constants(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=block_size,
            planes=planes_of(q)[0],
            is_fp8=is_fp8,
        ),
    )
    return out


def _check_dtypes(
    position: Tensor, slot_mapping: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor
) -> None:
    """Raises ValueError where the kernel would read or write another type than is there."""
    if key_cache.dtype not in KV_DTYPES:
        raise ValueError(f"key_cache is {key_cache.dtype}, none of {', '.join(map(str, KV_DTYPES))}")
    for name, value, dtype in (
        ("position", position, torch.int32),
        ("slot_mapping", slot_mapping, torch.int64),
        ("cos", cos, torch.float32),
        ("sin", sin, torch.float32),
        ("value_cache", value_cache, key_cache.dtype),
    ):
        if value.dtype != dtype:
            raise ValueError(f"{name} is {value.dtype}, not {dtype}")


def compile_cases(target: Target) -> list[CompileCase]:
    """Both models, every dtype of the cache, one plane and several."""
    return [
        compile_case(
            "rope_store",
            f"{model} {str(kv).removeprefix('torch.')} planes={planes}",
            target,
            rope_store_kernel,
            pointers=_pointers(kv),
            constants=_constants(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                block_size=16,
                planes=planes,
                is_fp8=kv == torch.float8_e4m3fn,
            )
            | {"key_dim_stride": 1, "value_dim_stride": 1}
            | ({} if kv == torch.float8_e4m3fn else {"key_scale_ptr": None, "value_scale_ptr": None}),
            divisible=[name for name in rope_store_kernel.arg_names if name.endswith("_stride")],
            is_named=(model, planes) == ("Llama-3-8B", 2) and kv != torch.float16,
        )
        for model, (num_heads, num_kv_heads, head_size) in _CASES.items()
        for kv in KV_DTYPES
        for planes in (1, 2)
    ]


def _pointers(kv: torch.dtype) -> dict[str, torch.dtype | str]:
    """What the kernel's pointers point to, scales only for a cache of float8."""
    is_fp8 = kv == torch.float8_e4m3fn
    cache: torch.dtype | str = "u8" if is_fp8 else kv
    floats = ("q_ptr", "k_ptr", "v_ptr", "cos_ptr", "sin_ptr")
    scales = ("key_scale_ptr", "value_scale_ptr") if is_fp8 else ()
    pointers: dict[str, torch.dtype | str] = dict.fromkeys((*floats, *scales), torch.float32)
    return pointers | {
        "out_ptr": torch.bfloat16,
        "position_ptr": "i32",
        "slot_mapping_ptr": "i64",
        "key_ptr": cache,
        "value_ptr": cache,
    }
