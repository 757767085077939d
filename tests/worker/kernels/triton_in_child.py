"""What the attention and rope tests run in other processes: triton reads TRITON_INTERPRET only once.

Each task needs the interpreter (or a GPU) and prints how much it has checked.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import cycle, product

import torch
from torch import Tensor

from tests.worker.kernels.attention_cases import ODD_SHAPES, AttentionCase, make_case, plain_attention
from worker.kernels.reference.paged_attention import paged_attention as reference
from worker.kernels.triton import prepare_triton

MANY = [(300, 1), (33, 33), (17, 2), (129, 1), (0, 0), (64, 5)]
PAIRWISE = [
    # rows, (group, KV heads), head size, block size, dtype, window, soft cap, programs
    (ODD_SHAPES["one token"], (1, 2), 64, 16, torch.float32, 0, 0.0, 1),
    (ODD_SHAPES["block border"], (3, 1), 80, 16, torch.float16, 0, 5.0, 2),
    (ODD_SHAPES["decode at the border"], (4, 2), 128, 8, torch.bfloat16, 7, 0.0, 3),
    (ODD_SHAPES["rows without tokens"], (8, 1), 96, 32, torch.float8_e4m3fn, 16, 3.0, 2),
    (ODD_SHAPES["ragged"], (20, 1), 64, 64, torch.float32, 33, 2.0, 5),
    (ODD_SHAPES["ragged"], (1, 2), 256, 16, torch.float16, 0, 0.0, 4),
    (MANY, (2, 1), 64, 256, torch.float8_e4m3fn, 0, 0.0, 16),
    (MANY, (4, 1), 16, 16, torch.float32, 100, 0.0, 1),
    ([(600, 1)], (5, 1), 80, 128, torch.bfloat16, 0, 4.0, 7),
    ([(599, 4)], (1, 1), 64, 16, torch.float32, 0, 0.0, 1),
]
TOLERANCE = {
    torch.float32: 4e-6,
    torch.float16: 2e-3,
    # Under the interpreter bfloat16 is multiplied as float32 and only read as what it is.
    torch.bfloat16: 4e-6
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
    else 2e-2,
    torch.float8_e4m3fn: 2e-3,
}


def launcher() -> Callable[..., Tensor]:
    prepare_triton()
    return import_module("worker.kernels.triton.paged_attention").paged_attention


def poisoned(like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan)


def compare() -> None:
    """Triton and the reference against float64, pairwise; outputs, workspace, unused slots are NaN before."""
    triton = launcher()
    from worker.kernels.triton.configs import AttentionConfig

    config = AttentionConfig(block_m=16, block_n=16, span_tokens=32, num_warps=1, num_stages=1)
    for rows, (group, num_kv_heads), head_size, block_size, dtype, window, soft_cap, programs in PAIRWISE:
        case = make_case(
            rows,
            group=group,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=block_size,
            dtype=dtype,
            keys_across=block_size == 8,
            window=window,
            soft_cap=soft_cap,
        )
        expected = plain_attention(case)
        mine = triton(
            *case.arguments(),
            **case.options(),
            config=config,
            num_programs=programs,
            workspace=torch.full((2_000_000,), torch.nan),
            out=poisoned(case.q),
        )
        torch.testing.assert_close(mine.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        twin = reference(*case.arguments(), **case.options())
        torch.testing.assert_close(twin.double(), expected, rtol=4e-6, atol=4e-6)
    print(len(PAIRWISE))  # noqa: T201 - the parent reads it


def compare_long() -> None:
    """The configs of both classes against the reference: head sizes, dtypes and block sizes in full.

    Groups, windows, caps, rows and programs take turns; their numbers have no common divisor with the others.
    """
    triton = launcher()
    from worker.batch import TokenClass

    rows = [
        MANY,
        [(600, 4), (16, 16)],
        [(257, 1), (511, 1), (1, 1)],
        [(33, 33)],
        [(599, 2), (5, 0)],
        [(48, 17)],
    ]
    turns = zip(
        cycle(rows), cycle((1, 8, 3, 4, 2, 20, 16)), cycle((0, 0, 7, 0, 300)), cycle((0.0, 5.0, 0.0)),
        cycle((1, 3, None)), strict=False,
    )  # fmt: skip
    count = 0
    for (head_size, dtype, block_size, token_class), (rows, group, window, soft_cap, programs) in zip(
        product((16, 64, 80, 96, 128, 256), TOLERANCE, (8, 16, 64, 256), TokenClass), turns, strict=False
    ):
        case = make_case(
            rows,
            group=group,
            num_kv_heads=1 + count % 2,
            head_size=head_size,
            block_size=block_size,
            dtype=dtype,
            keys_across=False,
            window=window,
            soft_cap=soft_cap,
            seed=count,
        )
        mine = triton(
            *case.arguments(),
            **case.options(),
            token_class=token_class,
            max_context_tokens=(600, 4096, 100_000)[count % 3],
            num_programs=programs,
            out=poisoned(case.q),
        )
        twin = reference(*case.arguments(), **case.options())
        torch.testing.assert_close(mine, twin, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        count += 1
    print(count)  # noqa: T201


def views() -> None:
    """Strided q and out, narrow q and out, padded rows and tokens: what a plan gives."""
    triton = launcher()
    case = make_case(ODD_SHAPES["ragged"], group=3, head_size=64, dtype=torch.float16)
    plain = triton(*case.arguments())
    num_tokens, width = plain.shape
    wide = poisoned(case.q).repeat(1, 3)
    wide[:, width : 2 * width] = case.q
    out = poisoned(wide)
    triton(wide[:, width : 2 * width], *case.arguments()[1:], out=out[:, :width])
    if not torch.equal(out[:, :width], plain) or not out[:, width:].isnan().all():
        raise AssertionError("strided q and out give something else")
    if not torch.equal(triton(case.q.half(), *case.arguments()[1:]), plain):
        raise AssertionError("q rounded before gives something else than q rounded in the kernel")
    half = triton(*case.arguments(), out=poisoned(case.q.half()))
    if not torch.equal(half, plain.half()):
        raise AssertionError("a narrow out is not the rounded one")
    num_rows = len(case.context_len)
    padded = replace(
        case,
        q=torch.cat((case.q, poisoned(case.q)[:5])),
        block_table=torch.cat((case.block_table, torch.full_like(case.block_table[:3], 2**31 - 1))),
        context_len=torch.cat((case.context_len, torch.zeros(3, dtype=torch.int32))),
        query_start=torch.cat((case.query_start, case.query_start[-1:].expand(3))),
    )
    for programs in (1, 3):
        out = triton(*padded.arguments(), num_programs=programs, out=poisoned(padded.q))
        if not torch.equal(out[:num_tokens], plain) or not out[num_tokens:].isnan().all():
            raise AssertionError("padding changes something, or is written")
    print(num_tokens, num_rows)  # noqa: T201


def invariance() -> None:
    """A row's bits alone, in other chunks, elsewhere in the pool, are those of its prefill among others.

    Whatever the number of programs: folded in the kernel or by the merge.
    """
    triton = launcher()
    from worker.kernels.triton.configs import AttentionConfig

    config = AttentionConfig(block_m=16, block_n=16, span_tokens=16, num_warps=1, num_stages=1)
    num_queries = 0
    for window, dtype in ((0, torch.float32), (20, torch.float16)):
        rows = [(70, 9), (1, 1), (35, 17)]
        case = make_case(rows, group=3, num_kv_heads=1, head_size=64, dtype=dtype, keys_across=False)
        options = {"window": window, "config": config}
        together = triton(*case.arguments(), **options, num_programs=1).view(torch.int32)
        if not torch.equal(triton(*case.arguments(), **options, num_programs=3).view(torch.int32), together):
            raise AssertionError("other bits with several programs")
        # The same blocks at other places.
        order = torch.randperm(case.key_cache.shape[0], generator=torch.Generator().manual_seed(1))
        place = torch.argsort(order).to(torch.int32)
        keys, values = case.key_cache[order], case.value_cache[order]
        for row, (context, count) in enumerate(rows):
            start = int(case.query_start[row])
            for query in range(0, count, 4):
                chunk = min(4, count - query) if row else 1
                alone = AttentionCase(
                    q=case.q[start + query : start + query + chunk],
                    key_cache=keys,
                    value_cache=values,
                    block_table=place[case.block_table[row : row + 1].long()],
                    context_len=torch.tensor([context - count + query + chunk], dtype=torch.int32),
                    query_start=torch.tensor([0, chunk], dtype=torch.int32),
                    scale=case.scale,
                )
                mine = triton(*alone.arguments(), **options, num_programs=2 - row % 2).view(torch.int32)
                if not torch.equal(mine, together[start + query : start + query + chunk]):
                    raise AssertionError(f"row {row}, query {query}: other bits alone than among others")
                num_queries += chunk
    print(num_queries)  # noqa: T201


def refusals() -> None:
    """What the launcher can't take is refused by the argument's name, and nothing is written."""
    triton = launcher()
    case = make_case([(20, 3)], group=2, head_size=16)
    for name, changed, options in (
        ("out", case, {"out": case.q[:, :-1]}),
        ("scale", replace(case, scale=-1.0), {}),
        ("window", case, {"window": -1}),
        ("soft_cap", case, {"soft_cap": float("inf")}),
        ("q", replace(case, q=case.q[:, ::2]), {}),
        ("key_cache", replace(case, key_cache=case.key_cache.double()), {}),
        ("value_cache", replace(case, value_cache=case.value_cache.half()), {}),
        ("context_len", replace(case, context_len=case.context_len.long()), {}),
        ("block_table", replace(case, block_table=case.block_table.repeat(2, 1)), {}),
        ("key_scale", case, {"key_scale": torch.ones(3)}),
        ("key_cache", make_case([(20, 3)], group=2, head_size=16, dtype=torch.float8_e4m3fn), {}),
        ("workspace", case, {"workspace": torch.empty(3, dtype=torch.float64)}),
    ):
        out = poisoned(case.q)
        try:
            triton(*changed.arguments(), **{"out": out, **options})
        except ValueError as error:
            if name not in str(error) or not out.isnan().all():
                raise AssertionError(f"{name}: {error}") from error
        else:
            raise AssertionError(f"a wrong {name} is taken")
    print("refused")  # noqa: T201


def unprepared() -> None:
    """Without a GPU, a launch in a process that was not prepared says what is missing."""
    import triton

    triton.__version__  # noqa: B018 - imported first, as a careless process would
    case = make_case([(3, 3)], group=1, head_size=16)
    for attempt in (
        prepare_triton,
        lambda: import_module("worker.kernels.triton.paged_attention").paged_attention(*case.arguments()),
    ):
        try:
            attempt()
        except RuntimeError as error:
            print("prepare_triton" in str(error))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    for task in sys.argv[1:]:
        {
            "compare": compare,
            "compare_long": compare_long,
            "views": views,
            "invariance": invariance,
            "refusals": refusals,
            "unprepared": unprepared,
        }[task]()
