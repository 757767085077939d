"""What the rope test runs in another process: triton reads TRITON_INTERPRET only once."""

import sys
from importlib import import_module
from itertools import cycle, product

import torch
from torch import Tensor

from worker.kernels.reference.rope_store import rope_store as reference
from worker.kernels.triton import prepare_triton

PAIRWISE = [
    # tokens, (heads, KV heads), head size, block size, dtype of the cache, planes, out
    (1, (4, 4), 16, 16, torch.float32, 1, torch.float32),
    (5, (9, 3), 64, 8, torch.float16, 2, torch.float16),
    (3, (5, 5), 80, 32, torch.bfloat16, 3, torch.float32),
    (17, (8, 2), 128, 16, torch.float8_e4m3fn, 2, torch.float16),
    (9, (2, 1), 96, 256, torch.float8_e4m3fn, 1, torch.bfloat16),
    (2, (3, 1), 256, 64, torch.float32, 4, torch.float32),
]
NUM_POSITIONS = 50


def written(cache: Tensor) -> Tensor:
    return cache.contiguous().view(torch.uint8)


def check_case(
    num_tokens: int,
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    planes: int,
    out_dtype: torch.dtype,
) -> None:
    """Against the twin, bit by bit: q, k and v are columns of one value, one token has no slot."""
    triton = import_module("worker.kernels.triton.rope_store").rope_store
    generator = torch.Generator().manual_seed(head_size)
    num_heads, num_kv_heads = heads
    num_blocks = num_tokens // block_size + 3
    caches = [
        torch.full((num_blocks, num_kv_heads, block_size, head_size), 3.0).to(dtype).transpose(1, 2)
        for _ in "kv"
    ]
    twins = [cache.clone() for cache in caches]
    ends = [num_heads * head_size, (num_heads + num_kv_heads) * head_size]
    width = (num_heads + 2 * num_kv_heads) * head_size
    x = torch.randn(planes, num_tokens, width, generator=generator) * 2
    # Beyond float8's range once it is divided, and below its normal numbers.
    x[0, :, ::3] *= 1e-3
    x[0, :, 1::7] *= 500
    q, k, v = (part if planes > 1 else part[0] for part in torch.tensor_split(x, ends, dim=-1))
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots[num_tokens // 2] = -1
    angle = torch.randn(NUM_POSITIONS, head_size // 2, generator=generator)
    position = torch.randint(0, NUM_POSITIONS, (num_tokens,), generator=generator, dtype=torch.int32)
    scales: dict[str, Tensor] = {}
    if dtype == torch.float8_e4m3fn:
        for name in ("key_scale", "value_scale"):
            scales[name] = torch.rand(num_kv_heads, generator=generator) + 0.3
    out = torch.full((num_tokens, ends[0] + 8), torch.nan, dtype=out_dtype)
    tables = position, slots, angle.cos(), angle.sin()
    triton(q, k, v, *tables, *caches, **scales, out=out[:, : ends[0]])
    expected = reference(q, k, v, *tables, *twins, **scales)
    # The interpreter truncates to bfloat16.
    ulp = 2.0**-7 if torch.bfloat16 in (dtype, out_dtype) else 0.0
    # A GPU may fuse what the twin rounds twice.
    rtol = ulp or (1e-6 if caches[0].device.type == "cpu" else 1e-3)
    torch.testing.assert_close(
        out[:, : ends[0]].float(), expected.to(out_dtype).float(), rtol=rtol, atol=1e-6
    )
    if not out[:, ends[0] :].isnan().all():
        raise AssertionError("what is beside out is written")
    for cache, twin in zip(caches, twins, strict=True):
        if dtype == torch.bfloat16:
            torch.testing.assert_close(cache.float(), twin.float(), rtol=ulp, atol=0.0)
        elif not torch.equal(written(cache), written(twin)):
            raise AssertionError(f"{dtype}: the cache differs from the twin's")


def check_every_float8() -> None:
    """Every float8, what lies half way between two, NaN and infinities are stored as torch rounds them."""
    triton = import_module("worker.kernels.triton.rope_store").rope_store
    exact = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = exact[~exact.isnan()].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    beyond = torch.tensor([torch.inf, -torch.inf, 500.0, -1e9, 1e-9, 0.0, -0.0])
    values = torch.cat(
        (finite, between, between.nextafter(finite[1:]), between.nextafter(finite[:-1]), beyond)
    )
    v = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 64)
    num_tokens = len(v)
    cache = torch.zeros(num_tokens // 8 + 1, 8, 1, 64).to(torch.float8_e4m3fn)
    twin = cache.clone()
    tables = (
        torch.zeros(num_tokens, dtype=torch.int32),
        torch.arange(num_tokens),
        torch.ones(1, 32),
        torch.zeros(1, 32),
    )
    zeros = torch.zeros_like(v)
    triton(zeros, zeros, v, *tables, cache.clone(), cache)
    reference(zeros, zeros, v, *tables, twin.clone(), twin)
    if not torch.equal(written(cache), written(twin)):
        raise AssertionError("a float8 is rounded otherwise than torch does")
    triton(zeros, zeros, torch.full_like(v, torch.nan), *tables, twin, cache)
    if not cache.float().flatten(0, 1)[:num_tokens].isnan().all():
        raise AssertionError("NaN is stored as a number")


def check_refusals() -> None:
    """A wrong argument is named, and nothing is written."""
    triton = import_module("worker.kernels.triton.rope_store").rope_store
    x = torch.randn(3, 32)
    cache = torch.zeros(2, 8, 2, 16)
    good = {
        "q": x,
        "k": x,
        "v": x,
        "position": torch.zeros(3, dtype=torch.int32),
        "slot_mapping": torch.arange(3),
        "cos": torch.ones(4, 8),
        "sin": torch.ones(4, 8),
        "key_cache": cache,
        "value_cache": cache.clone(),
    }
    for name, value in (
        ("q", x[:, ::2]),
        ("k", x[:, :16]),
        ("v", x[:2]),
        ("position", torch.zeros(3)),
        ("slot_mapping", torch.arange(4)),
        ("sin", torch.ones(4, 7)),
        ("cos", torch.ones(4, 8).double()),
        ("key_cache", cache.int()),
        ("value_cache", cache.half()),
    ):
        try:
            triton(**{**good, name: value})
        except ValueError as error:
            if not str(error).startswith(name) or cache.any():
                raise AssertionError(f"{name}: {error}") from error
        else:
            raise AssertionError(f"a wrong {name} is taken")


def check_product() -> int:
    """Head sizes, dtypes, planes and outs in full, heads and block sizes in turns; the number of cases."""
    turns = zip(cycle(((4, 4), (9, 3), (8, 1), (5, 5), (10, 2))), cycle((8, 16, 32, 256)), strict=False)
    count = 0
    for (head_size, dtype, planes, out), (heads, block_size) in zip(
        product(
            (16, 64, 80, 96, 128, 256),
            (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
            (1, 2, 4),
            (torch.float32, torch.float16, torch.bfloat16),
        ),
        turns,
        strict=False,
    ):
        check_case(1 + count % 6, heads, head_size, block_size, dtype, planes, out)
        count += 1
    return count


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare_triton()
    if sys.argv[1:] == ["long"]:
        print(check_product())  # noqa: T201 - the parent reads it
        sys.exit()
    for case in PAIRWISE:
        check_case(*case)
    check_every_float8()
    check_refusals()
    print(len(PAIRWISE))  # noqa: T201
