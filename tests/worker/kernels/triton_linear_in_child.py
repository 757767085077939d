"""What test_triton_linear.py runs in other processes: triton reads TRITON_INTERPRET only once."""

import dataclasses
import itertools
import sys
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from worker.batch import TokenClass
from worker.kernels.quantised import QUANT_KINDS, QuantisedMatrix
from worker.kernels.reference import embedding as reference_embedding
from worker.kernels.reference import linear as reference_linear
from worker.kernels.reference import linear_swiglu as reference_linear_swiglu
from worker.kernels.triton import prepare_triton

Weight = Tensor | QuantisedMatrix
# Tokens, intermediate outputs, inputs, kind, class, dtype of x: pairwise over token counts at the borders of
# tiles, outputs and inputs that fill no tile, and all kinds.
CASES = (
    (1, 70, 96, "float32", TokenClass.DECODE, torch.float32),
    (2, 64, 160, "bfloat16", TokenClass.PREFILL, torch.bfloat16),
    (3, 33, 96, "q4_0", TokenClass.PREFILL, torch.float32),
    (5, 130, 32, "q8_0", TokenClass.DECODE, torch.float16),
    (7, 1, 256, "q4_1", TokenClass.DECODE, torch.float32),
    (15, 70, 64, "float16", TokenClass.PREFILL, torch.float16),
    (16, 64, 576, "q4_0", TokenClass.DECODE, torch.float32),
    (17, 33, 128, "bfloat16", TokenClass.DECODE, torch.float32),
    (17, 70, 53, "float32", TokenClass.PREFILL, torch.float32),
    (33, 130, 160, "q8_0", TokenClass.PREFILL, torch.float32),
    (33, 31, 64, "float16", TokenClass.DECODE, torch.float32),
    (65, 33, 288, "q4_1", TokenClass.PREFILL, torch.bfloat16),
    (65, 70, 96, "bfloat16", TokenClass.DECODE, torch.bfloat16),
)
LONG_CASES = tuple(
    (tokens, outputs, inputs, kind, token_class, dtype)
    for (tokens, token_class), (outputs, inputs), kind, dtype in itertools.product(
        itertools.product((*range(1, 18), 33, 65), TokenClass),
        ((70, 96), (129, 288)),
        ("float32", "float16", "bfloat16", *QUANT_KINDS),
        (torch.float32, torch.bfloat16),
    )
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_weight(kind: str, num_rows: int, width: int, seed: int = 1) -> Weight:
    values = draw(num_rows, width, seed=seed) / width**0.5
    if kind in QUANT_KINDS:
        return QuantisedMatrix.from_gguf(kind, quantize(values.numpy(), GGMLQuantizationType[kind.upper()]))
    return values.to(getattr(torch, kind))


def exact(x: Tensor, weight: Weight) -> Tensor:
    """The product in float64, of what is left of x and weight after they are rounded."""
    if isinstance(weight, QuantisedMatrix):
        return x.double() @ weight.dequantise().double().T
    return x.to(weight.dtype).double() @ weight.double().T


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """NaN, with rows that are apart by more than their width."""
    return torch.full((*shape[:-1], shape[-1] + 3), float("nan"), dtype=dtype)[..., : shape[-1]]


def print_count(count: int) -> None:
    print(count)  # noqa: T201 - the parent reads it


def check(found: Tensor, expected: Tensor, label: object) -> None:
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=1e-5, atol=4e-6, msg=lambda text: f"{label}: {text}"
    )


def compare(cases: tuple[tuple[int, int, int, str, TokenClass, torch.dtype], ...] = CASES) -> None:
    """Products against float64 and against the twins; x and out strided, out poisoned."""
    from worker.kernels.triton.linear import linear
    from worker.kernels.triton.linear_swiglu import linear_swiglu

    for case in cases:
        tokens, inner, inputs, kind, token_class, dtype = case
        x = draw(tokens, inputs + 5).to(dtype)[:, :inputs]
        weight = make_weight(kind, 2 * inner, inputs)
        product = exact(x, weight)
        out = poisoned(tokens, 2 * inner)
        if linear(x, weight, token_class=token_class, out=out) is not out:
            raise AssertionError("out is not what is returned")
        check(out, product, case)
        check(out, reference_linear.linear(x, weight, compute=torch.float32), case)
        gated = F.silu(product[:, :inner]) * product[:, inner:]
        out = linear_swiglu(x, weight, token_class=token_class, out=poisoned(tokens, inner))
        check(out, gated, case)
        check(out, reference_linear_swiglu.linear_swiglu(x, weight, compute=torch.float32), case)
    print_count(len(cases))


def compare_long() -> None:
    """All of token counts, classes, shapes, kinds and dtypes."""
    compare(LONG_CASES)


def planes() -> None:
    """Sums of parts of K, each against its own product; all targets' tiles for decoding."""
    from worker.kernels.triton.configs import LinearConfig, linear_config
    from worker.kernels.triton.linear import linear
    from worker.kernels.triton.targets import INTERPRETER, TARGETS

    num_cases = 0
    for kind, splits in (("float32", 4), ("bfloat16", 2), ("q8_0", 4), ("q4_1", 2)):
        block_k = {"q8_0": 64, "q4_1": 128}.get(kind, 32)
        config = LinearConfig(16, 64, block_k, 4, 1, splits)
        x, weight = draw(5, block_k * splits * 2), make_weight(kind, 70, block_k * splits * 2)
        out = linear(x, weight, config=config, out=poisoned(splits, 5, 70))
        check(out, reference_linear.linear(x, weight, compute=torch.float32, planes=splits), kind)
        check(out.double().sum(0), exact(x, weight), kind)
        num_cases += 1
    for target in (*TARGETS.values(), INTERPRETER):
        sizes = {"num_outputs": 96, "num_inputs": 2048}
        config = linear_config(target, TokenClass.DECODE, kind="float16", **sizes)
        x, weight = draw(3, 2048), make_weight("float16", 96, 2048)
        out = linear(x, weight, config=config, out=poisoned(config.splits, 3, 96))
        check(out.double().sum(0), exact(x, weight), target.name)
        num_cases += config.splits > 1
    print_count(num_cases)


def invariance() -> None:
    """A row's bits alone are those among 2 to 70 others and in another order; rows of NaN touch no other."""
    from worker.kernels.triton.linear import linear
    from worker.kernels.triton.linear_swiglu import linear_swiglu

    num_rows = 0
    for kind, token_class in itertools.product(("float32", "q4_0"), TokenClass):
        x, weight = draw(70, 128), make_weight(kind, 34, 128)
        operators: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda rows, w=weight, c=token_class: linear(rows, w, token_class=c),
            lambda rows, w=weight, c=token_class: linear_swiglu(rows, w, token_class=c),
        )
        for operator in operators:
            among = operator(x).view(torch.int32)
            order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
            if not torch.equal(operator(x[order]).view(torch.int32), among[order]):
                raise AssertionError(f"{kind}, {token_class}: other bits in another order")
            for row in (0, 1, 15, 16, 33, 69):
                if not torch.equal(operator(x[row : row + 1]).view(torch.int32)[0], among[row]):
                    raise AssertionError(f"{kind}, {token_class}: row {row} has other bits alone")
                num_rows += 1
            for count in (2, 17, 40):
                broken = x[:count].clone()
                broken[1:] = float("nan")
                if not torch.equal(operator(broken).view(torch.int32)[0], among[0]):
                    raise AssertionError(f"{kind}, {token_class}: rows of NaN reach another row")
    print_count(num_rows)


def embed() -> None:
    """Rows of tables of all kinds, bit for bit, and of no tokens none."""
    from worker.kernels.triton.embedding import embedding

    num_cases = 0
    for kind in ("float32", "float16", "bfloat16", *QUANT_KINDS):
        for width in (32, 96, 1056):
            table = make_weight(kind, 11, width)
            ids = torch.tensor([10, 0, 3, 3, 7], dtype=torch.int32)
            out = embedding(table, ids, out=poisoned(5, width))
            if not torch.equal(out, reference_embedding.embedding(table, ids)):
                raise AssertionError(f"{kind} of width {width}")
            num_cases += 1
        if embedding(table, ids[:0]).shape != (0, width):
            raise AssertionError("no tokens")
    print_count(num_cases)


def refusals() -> None:
    """Arguments that don't fit are refused by name, and nothing is written."""
    from worker.kernels.triton.configs import LinearConfig
    from worker.kernels.triton.embedding import embedding
    from worker.kernels.triton.linear import linear
    from worker.kernels.triton.linear_swiglu import linear_swiglu

    x, weight, quantised = draw(3, 64), draw(6, 64), make_weight("q8_0", 6, 64)
    out = poisoned(3, 6)
    ids = torch.zeros(3, dtype=torch.int32)
    two = LinearConfig(16, 64, 32, 4, 1, 2)
    attempts: tuple[tuple[str, Callable[[], object]], ...] = (
        ("x is", lambda: linear(x.double(), weight, out=out)),
        ("x is", lambda: linear(x.T, weight, out=out)),
        ("x has rows of 32, weight of 64", lambda: linear(x[:, :32], weight, out=out)),
        ("weight is", lambda: linear(x, weight.double(), out=out)),
        ("weight is", lambda: linear(x, draw(64, 6).T, out=out)),
        ("compute=", lambda: linear(x, weight, compute=torch.float16, out=out)),
        ("compute=", lambda: linear(x, quantised, compute=torch.bfloat16, out=out)),
        ("config.block_k=32", lambda: linear(x, quantised, config=two, out=out)),
        ("out is", lambda: linear(x, weight, out=out[:2])),
        ("out is", lambda: linear(x, weight, out=out.half())),
        ("out is on", lambda: linear(x, weight, out=draw(6, 3).T)),
        ("out has 3 planes", lambda: linear(x, weight, config=two, out=poisoned(3, 3, 6))),
        (
            "out has 2 planes",
            lambda: linear(x, weight, config=dataclasses.replace(two, block_k=64), out=poisoned(2, 3, 6)),
        ),
        ("gate_up has 5 rows", lambda: linear_swiglu(x, weight[:5])),
        ("out is", lambda: linear_swiglu(x, weight, out=out)),
        ("token_ids is", lambda: embedding(weight, ids.long())),
        ("out is", lambda: embedding(weight, ids, out=out)),
        ("weight is", lambda: embedding(weight.double(), ids)),
    )
    for message, attempt in attempts:
        try:
            attempt()
        except ValueError as error:
            if not str(error).startswith(message):
                raise AssertionError(f"wanted {message!r}, got {str(error)!r}") from error
        else:
            raise AssertionError(f"{message}: nothing was refused")
    if not np.isnan(out.numpy()).all():
        raise AssertionError("a refused call has written")
    print_count(len(attempts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare_triton()
    for task in sys.argv[1:]:
        globals()[task]()
