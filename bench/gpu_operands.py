"""Random operands of single kernels, as a model's step has them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu_models import BLOCK_SIZE
from worker.kernels.quantised import GROUP, QUANT_KINDS, QuantisedMatrix, QuantKind
from worker.kv.storage import KvStorage

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def random_matrix(
    kind: str, shape: tuple[int, int], *, device: torch.device, seed: int = 0
) -> Tensor | QuantisedMatrix:
    """A weight whose products with rows of size one are of size one.

    Args:
        kind: `float32`, `float16`, `bfloat16`, `q8_0`, `q4_0` or `q4_1`.
        shape: (N, K).
        device: Where it is made.
        seed: Same seed, same weight on one kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    quantised: dict[str, QuantKind] = {each: each for each in QUANT_KINDS}
    if kind not in quantised:
        weight = torch.empty(shape, dtype=DTYPES[kind], device=device)
        return weight.normal_(0.0, shape[1] ** -0.5, generator=generator)
    num_rows, num_groups = shape[0], shape[1] // GROUP
    is_wide = kind == "q8_0"
    # As a file has it: of each group its scale, its least value if it has one, its quants.
    step = shape[1] ** -0.5 / (74 if is_wide else 4.6)
    scales = torch.rand(num_rows, num_groups, 1, generator=generator, device=device)
    scales = (step * (0.5 + scales)).to(torch.float16)
    heads = [scales, *([(-7.5 * scales.float()).to(torch.float16)] if kind == "q4_1" else [])]
    quants = torch.randint(
        256,
        (num_rows, num_groups, GROUP if is_wide else GROUP // 2),
        generator=generator,
        device=device,
        dtype=torch.uint8,
    )
    raw = torch.cat([*(head.view(torch.uint8) for head in heads), quants], dim=2)
    return QuantisedMatrix.from_gguf(quantised[kind], raw.flatten(1))


def dense(weight: Tensor | QuantisedMatrix) -> Tensor:
    """The numbers that a weight stands for, float64."""
    return (weight.dequantise() if isinstance(weight, QuantisedMatrix) else weight).double()


def num_bytes(weight: Tensor | QuantisedMatrix) -> int:
    """What a product reads of it."""
    return weight.num_bytes if isinstance(weight, QuantisedMatrix) else weight.nbytes


@dataclass(frozen=True, slots=True)
class Attended:
    """Rows over a pool, and the arguments of attention that say what is attended.

    Attributes:
        kv: The pool; each layer is another operand of the same shape.
        block_table: [R, max_blocks] int32.
        context_len: [R] int32.
        query_start: [R + 1] int32.
        num_tokens: Of all rows.
    """

    kv: KvStorage
    block_table: Tensor
    context_len: Tensor
    query_start: Tensor
    num_tokens: int

    def arguments(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Keys, values, block table, context lengths and starts of queries."""
        return (
            self.kv.keys[layer],
            self.kv.values[layer],
            self.block_table,
            self.context_len,
            self.query_start,
        )


def attended(
    rows: list[tuple[int, int]],
    *,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_layers: int = 1,
    block_size: int = BLOCK_SIZE,
    seed: int = 0,
) -> Attended:
    """Rows of given contexts, their blocks in no order, among as many blocks of NaN.

    Args:
        rows: Of each its context length and its number of new tokens.
        num_kv_heads: Of the pool.
        head_size: Of the pool.
        dtype: Of the pool; float8 has scales of 1.
        device: Where it is made.
        num_layers: Operands of that shape.
        block_size: Tokens per block.
        seed: Same seed, same numbers on one kind of device.
    """
    needed = [-(-context // block_size) for context, _ in rows]
    used = sum(needed)
    kv = KvStorage(
        num_blocks=2 * used,
        num_layers=num_layers,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        keys_across=False,
        device=device,
    )
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.randperm(2 * used, generator=torch.Generator().manual_seed(seed)).tolist()
    is_poisoned = torch.zeros(2 * used, dtype=torch.bool)
    is_poisoned[order[used:]] = True
    for start in range(0, 2 * used, 256):
        piece = kv.data[start : start + 256]
        numbers = torch.randn(piece.shape, generator=generator, device=device)
        numbers[is_poisoned[start : start + 256].to(device)] = float("nan")
        piece.copy_(numbers.to(dtype))
    table = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    end = 0
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor(order[end : end + count], dtype=torch.int32)
        end += count
    starts = torch.tensor([0, *(count for _, count in rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    contexts = torch.tensor([context for context, _ in rows], dtype=torch.int32)
    return Attended(kv, table.to(device), contexts.to(device), starts.to(device), int(starts[-1]))
