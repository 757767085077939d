"""What `linear` and `linear_swiglu` share on the host: a checked weight, and the constants of its kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from worker.batch import TokenClass
from worker.kernels.quantised import GROUP, PLANES, QuantisedMatrix
from worker.kernels.triton.configs import LinearConfig, linear_config
from worker.kernels.triton.targets import target_of

KINDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""Kinds of plain weights; those of quantised ones are their own."""
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_WIDE_STAGES = 2
_DECODED_TOKENS = 64
"""Tokens of decode class that share one pass over the weights."""


@dataclass(frozen=True, slots=True)
class Product:
    """One product `x @ weight.T`, checked, with all that its launch takes.

    Attributes:
        x: [T, K], its rows dense, rounded already where the interpreter can't.
        num_outputs: N, of all stacked parts.
        num_inputs: K.
        config: How it is cut.
        constants: Compile-time arguments of the kernel.
        weight_arguments: Weight or words of quants, pairs of scales, of mins; None for what there is not.
        weight_strides: Elements from row to row of the first, and of the other two.
    """

    x: Tensor
    num_outputs: int
    num_inputs: int
    config: LinearConfig
    constants: Mapping[str, Any]
    weight_arguments: tuple[Tensor, Tensor | None, Tensor | None]
    weight_strides: tuple[int, int]

    @property
    def tokens_of_program(self) -> int:
        """Tokens that one program multiplies."""
        return int(self.constants["BLOCK_M"] * self.constants["ROW_TILES"])

    def num_planes(self, out: Tensor) -> int:
        """Checks an out [T, N] float32, or [splits, T, N], and says into how many parts K is cut for it.

        Raises:
            ValueError: It is none of these.
        """
        planes = out.shape[0] if out.dim() == 3 else 1
        expected = (self.x.shape[0], self.num_outputs)
        if out.dtype != torch.float32 or out.shape[-2:] != expected or out.dim() not in (2, 3):
            raise ValueError(
                f"out is {list(out.shape)} {out.dtype}: {list(expected)} float32, or planes of it, is"
            )
        if planes not in (1, self.config.splits) or (planes > 1 and self.num_blocks % planes + self.rest):
            raise ValueError(
                f"out has {planes} planes: K={self.num_inputs} is cut into 1 or {self.config.splits} parts "
                f"of whole blocks of {self.config.block_k}"
            )
        check_rows(out, self.x)
        return planes

    @property
    def num_blocks(self) -> int:
        """Whole blocks of K."""
        return self.num_inputs // self.config.block_k

    @property
    def rest(self) -> int:
        """Elements of K behind the last whole block."""
        return self.num_inputs % self.config.block_k


def make_product(
    kernel: Any,
    x: Tensor,
    weight: Tensor | QuantisedMatrix,
    *,
    token_class: TokenClass,
    compute: torch.dtype | None,
    config: LinearConfig | None,
) -> Product:
    """Checks a product's arguments and works out its launch.

    Args:
        kernel: What will run it, compiled or interpreted.
        x: [T, K] float32, float16 or bfloat16.
        weight: [N, K] float32, float16, bfloat16 or quantised.
        token_class: Of the tokens.
        compute: What x and dequantised weights are rounded to; None for the default.
        config: In place of the table's.

    Raises:
        ValueError: The arguments don't fit together; the message names them.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    is_interpreted = isinstance(kernel, InterpretedFunction)
    require_runnable(kernel, x)
    if x.dim() != 2 or x.dtype not in KINDS or x.stride(1) != 1:
        raise ValueError(f"x is {list(x.shape)} {x.dtype} of strides {x.stride()}: [T, K] with dense rows is")
    num_outputs, num_inputs = weight.shape
    if num_inputs != x.shape[1]:
        raise ValueError(f"x has rows of {x.shape[1]}, weight of {num_inputs}")
    if weight.device != x.device:
        raise ValueError(f"x is on {x.device}, weight on {weight.device}")
    kind, dtype = weight_kind(weight), _compute(weight, compute, is_interpreted=is_interpreted)
    if config is None:
        sizes = {"num_outputs": num_outputs, "num_inputs": num_inputs}
        target = target_of(x.device)
        config = linear_config(target, token_class, kind=kind, **sizes)
        if isinstance(weight, QuantisedMatrix) and dtype == torch.float32:
            # Fragments of float32 are of another size; blocks and parts of K stay those of the kind.
            plain = linear_config(target, token_class, kind="float32", **sizes)
            config = replace(plain, block_k=config.block_k, splits=config.splits)
    if isinstance(weight, QuantisedMatrix) and config.block_k != PLANES[weight.kind] * GROUP:
        raise ValueError(
            f"config.block_k={config.block_k}: a span of {kind} is {PLANES[weight.kind] * GROUP}"
        )
    if x.dtype == torch.float32 and dtype != torch.float32:
        config = with_wide_tokens(config)
    if is_interpreted and dtype == torch.bfloat16:
        # The interpreter truncates on the way to bfloat16 and has no dot of it: products of rounded values
        # are exact in float32.
        x, dtype = x.bfloat16(), torch.float32
    constants = product_constants(
        config, token_class, kind=kind, compute=dtype, num_tokens=x.shape[0], num_inputs=num_inputs
    )
    return Product(
        x, num_outputs, num_inputs, config, constants, weight_arguments(weight), weight_strides(weight)
    )


def max_row_tiles(config: LinearConfig, token_class: TokenClass) -> int:
    """Tiles of tokens that one program multiplies at most."""
    return max(1, _DECODED_TOKENS // config.block_m) if token_class is TokenClass.DECODE else 1


def with_wide_tokens(config: LinearConfig) -> LinearConfig:
    """The config for x of float32 where products are of 16 bits: its tiles take twice the shared memory.

    Fewer loads are in flight; what is computed, and in which order, stays. A plan has such an x only where
    one value is multiplied in several dtypes.
    """
    return replace(config, num_stages=min(config.num_stages, _WIDE_STAGES))


def product_constants(
    config: LinearConfig,
    token_class: TokenClass,
    *,
    kind: str,
    compute: torch.dtype,
    num_tokens: int,
    num_inputs: int,
) -> dict[str, Any]:
    """Compile-time arguments of both kernels."""
    most = max_row_tiles(config, token_class)
    row_tiles = 1
    while row_tiles < most and row_tiles * config.block_m < num_tokens:
        row_tiles *= 2
    return {
        "KIND": kind,
        "COMPUTE": _TYPES[compute],
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "ROW_TILES": row_tiles,
        "EVEN_K": num_inputs % config.block_k == 0,
    }


def check_rows(out: Tensor, x: Tensor) -> None:
    """Checks that out is where x is, and that its rows are dense.

    Raises:
        ValueError: It is not so.
    """
    if out.device != x.device or out.stride(-1) != 1:
        raise ValueError(
            f"out is on {out.device}, of strides {out.stride()}: dense rows on {x.device}, as x, are"
        )


def require_runnable(kernel: Any, tensor: Tensor) -> None:
    """Checks that a kernel runs where a tensor is.

    Raises:
        RuntimeError: The tensor is on the CPU and the kernel is compiled for a GPU.
    """
    if tensor.device.type == "cpu" and not isinstance(kernel, InterpretedFunction):
        raise RuntimeError(
            "CPU tensors: prepare_triton() says where they must be, before anything imports triton"
        )


def weight_arguments(weight: Tensor | QuantisedMatrix) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What kernels read of a weight: itself or its words, pairs of scales, pairs of mins."""
    if not isinstance(weight, QuantisedMatrix):
        return weight, None, None
    mins = None if weight.mins is None else weight.mins.view(torch.int32)
    return weight.quants, weight.scales.view(torch.int32), mins


def weight_strides(weight: Tensor | QuantisedMatrix) -> tuple[int, int]:
    """Elements from row to row of the weight or its words, and of its pairs."""
    if not isinstance(weight, QuantisedMatrix):
        return weight.stride(0), 0
    return weight.quants.stride(0), weight.scales.stride(0) // 2


def weight_kind(weight: Tensor | QuantisedMatrix) -> str:
    """The name that tells how a weight is stored: a dtype's, or a quantisation's.

    Raises:
        ValueError: A plain weight is of another dtype, or its rows are not dense.
    """
    if isinstance(weight, QuantisedMatrix):
        return weight.kind
    if weight.dtype not in KINDS or weight.stride(1) != 1:
        raise ValueError(
            f"weight is {weight.dtype} of strides {weight.stride()}: float32, float16 or bfloat16 with dense "
            "rows is"
        )
    return KINDS[weight.dtype]


def _compute(
    weight: Tensor | QuantisedMatrix, compute: torch.dtype | None, *, is_interpreted: bool
) -> torch.dtype:
    if not isinstance(weight, QuantisedMatrix):
        if compute not in (None, weight.dtype):
            raise ValueError(f"compute={compute}: a plain weight is multiplied in its own, {weight.dtype}")
        return weight.dtype
    if compute is None:
        return torch.float32 if is_interpreted else torch.bfloat16
    if compute not in KINDS or (is_interpreted and compute == torch.bfloat16):
        raise ValueError(f"compute={compute}: float32, float16 or, on a GPU, bfloat16 is")
    return compute
