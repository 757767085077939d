"""Which forms of a product's kernel are compiled to be looked at. Knows no compiler."""

from collections.abc import Mapping
from typing import Any

import torch

from worker.batch import TokenClass
from worker.kernels.quantised import QUANT_KINDS
from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.configs import LinearConfig, linear_config
from worker.kernels.triton.product import KINDS, max_row_tiles, product_constants, with_wide_tokens
from worker.kernels.triton.targets import Target

_POINTERS = {
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "q8_0": "*i16",
    "q4_0": "*u16",
    "q4_1": "*u16",
}
_NAMED = {
    (TokenClass.DECODE, "bfloat16", 4),
    (TokenClass.DECODE, "q8_0", 1),
    (TokenClass.DECODE, "q4_1", 1),
    (TokenClass.PREFILL, "bfloat16", 1),
    (TokenClass.PREFILL, "q4_0", 1),
}
"""Each class, plain and quantised, one tile of tokens and as many as there may be."""


def product_cases(
    op: str, kernel: Any, target: Target, shapes: tuple[tuple[int, int], ...], *, out_type: str = ""
) -> list[CompileCase]:
    """Cases of `linear_kernel` or `linear_swiglu_kernel`, one for every form that is compiled.

    Sizes of a weight are no constants, so most shapes share their kernel.

    Args:
        op: Module of the kernel.
        kernel: The function under `triton.jit`.
        target: What for.
        shapes: (N, K) of weights.
        out_type: Of the kernel's out pointer; empty for that of x.
    """
    cases: dict[str, CompileCase] = {}
    for num_outputs, num_inputs in shapes:
        for token_class in TokenClass:
            for kind, pointer in _POINTERS.items():
                config = linear_config(
                    target, token_class, num_outputs=num_outputs, num_inputs=num_inputs, kind=kind
                )
                row_tiles = 1
                while row_tiles <= max_row_tiles(config, token_class):
                    constants = product_constants(
                        config,
                        token_class,
                        kind=kind,
                        compute=_compute(kind),
                        num_tokens=row_tiles * config.block_m,
                        num_inputs=num_inputs,
                    )
                    tail = "" if constants["EVEN_K"] else " with a rest of K"
                    label = f"{token_class.value} {kind}, {row_tiles} x {config.block_m} tokens{tail}"
                    if label not in cases:
                        is_named = not tail and (token_class, kind, row_tiles) in _NAMED
                        cases[label] = _case(
                            op, label, kernel, target, kind, config, constants, out_type, is_named=is_named
                        )
                        if kind == "bfloat16" and not tail:
                            wide = f"{label}, float32 x"
                            cases[wide] = _case(
                                *(op, wide, kernel, target, kind, with_wide_tokens(config), constants),
                                out_type or pointer,
                                x_type="*fp32",
                                is_named=False,
                            )
                    row_tiles *= 2
    return list(cases.values())


def _compute(kind: str) -> torch.dtype:
    plain = {name: dtype for dtype, name in KINDS.items()}
    return torch.bfloat16 if kind in QUANT_KINDS else plain[kind]


def _case(
    op: str,
    label: str,
    kernel: Any,
    target: Target,
    kind: str,
    config: LinearConfig,
    constants: Mapping[str, Any],
    out_type: str,
    *,
    x_type: str = "",
    is_named: bool,
) -> CompileCase:
    x_type = x_type or _POINTERS[KINDS[_compute(kind)]]
    types = {"x_ptr": x_type, "w_ptr": _POINTERS[kind], "out_ptr": out_type or x_type}
    absent = {"scales_ptr": None, "mins_ptr": None}
    for name, has_it in (("scales_ptr", kind in QUANT_KINDS), ("mins_ptr", kind == "q4_1")):
        if has_it:
            types[name] = "*i32"
            del absent[name]
    all_constants = dict(constants) | absent
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in all_constants}
    return CompileCase(
        op=op,
        label=label,
        target=target,
        kernel=kernel,
        signature=signature,
        constants=all_constants,
        divisible=frozenset(signature) - {"num_tokens", "num_blocks", "blocks_per_split"},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        is_named=is_named,
        wide=frozenset({"w_ptr"}),
        matrix=_matrix(target, config, kind),
    )


def _matrix(target: Target, config: LinearConfig, kind: str) -> str:
    """The instruction that a config is made for."""
    if target.backend == "hip":
        if kind == "float32":
            return "v_mfma_f32_16x16x4_f32" if config.block_m == 16 else "v_mfma_f32_32x32x2_f32"
        return "v_mfma_f32_16x16x16" if config.block_m == 16 else "v_mfma_f32_32x32x8"
    if kind == "float32":
        return ""
    if target.arch == 80:
        return "mma.sync.aligned.m16n8k16"
    if target.arch == 90:
        return f"wgmma.mma_async.sync.aligned.m64n{config.block_m}k16"
    return "tcgen05.mma"
