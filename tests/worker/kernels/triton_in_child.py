"""What test_triton_paged_attention.py runs in other processes: triton reads TRITON_INTERPRET only once.

`compare` and `invariance` need the interpreter (or a GPU), `compile` needs it not to be set.
"""

import sys

import torch

from tests.worker.kernels.attention_cases import ODD_SHAPES, AttentionCase, make_case
from worker.kernels.ops import implementations
from worker.kernels.triton import prepare_triton


def compare() -> None:
    """Triton against the reference over odd shapes, groups, head and block sizes; unused slots are NaN."""
    prepare_triton()
    triton, reference = (implementations(name)["paged_attention"] for name in ("triton", "reference"))
    if triton is reference:
        raise AssertionError("the table gives triton the reference")
    num_cases = 0
    for rows in ODD_SHAPES.values():
        for group, head_size, block_size in (
            (1, 16, 16),
            (3, 64, 16),
            (4, 80, 16),
            (3, 80, 16),
            (1, 64, 8),
            (20, 16, 32),
        ):
            case = make_case(rows, group=group, head_size=head_size, block_size=block_size)
            arguments = case.arguments()
            torch.testing.assert_close(triton(*arguments), reference(*arguments), rtol=1e-5, atol=4e-6)
            num_cases += 1
    # Rows of an arena are apart by more than their width.
    for strided in (
        case.q.repeat(1, 2)[:, : case.q.shape[1]],
        case.q.repeat(1, 3)[:, case.q.shape[1] : -case.q.shape[1]],
    ):
        if strided.is_contiguous() or not torch.equal(triton(strided, *arguments[1:]), triton(*arguments)):
            raise AssertionError("a strided q gives something else")
        num_cases += 1
    print(num_cases)  # noqa: T201 - the parent reads it


def invariance() -> None:
    """A row's bits alone, decoded token by token, are those of its prefill among others."""
    prepare_triton()
    triton = implementations("triton")["paged_attention"]
    rows = [(40, 9), (1, 1), (35, 35)]
    case = make_case(rows, group=3, head_size=64)
    together = triton(*case.arguments()).view(torch.int32)
    num_queries = 0
    for row, (context, count) in enumerate(rows):
        start = int(case.query_start[row])
        for query in range(count):
            alone = AttentionCase(
                q=case.q[start + query : start + query + 1],
                key_cache=case.key_cache,
                value_cache=case.value_cache,
                block_table=case.block_table[row : row + 1],
                context_len=torch.tensor([context - count + query + 1], dtype=torch.int32),
                query_start=torch.tensor([0, 1], dtype=torch.int32),
                scale=case.scale,
            )
            mine = triton(*alone.arguments()).view(torch.int32)[0]
            if not torch.equal(mine, together[start + query]):
                raise AssertionError(f"row {row}, query {query}: other bits alone than among others")
            num_queries += 1
    print(num_queries)  # noqa: T201


def compile_sm90() -> None:
    """Compiles for sm_90 and prints the number of TF32 instructions: a float32 product must have none."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    from worker.kernels.triton.paged_attention import paged_attention_kernel, tile_sizes

    sizes = tile_sizes(block_size=16, head_size=64, group=3)
    kinds = dict.fromkeys(sizes, "constexpr") | {"scale": "fp32"}
    kinds |= dict.fromkeys(("q_ptr", "out_ptr", "key_ptr", "value_ptr"), "*fp32")
    kinds |= dict.fromkeys(("block_table_ptr", "context_len_ptr", "query_start_ptr"), "*i32")
    signature = {name: kinds.get(name, "i32") for name in paged_attention_kernel.arg_names}
    source = ASTSource(fn=paged_attention_kernel, signature=signature, constexprs=sizes)
    compiled = compile_kernel(source, target=GPUTarget("cuda", 90, 32))
    if not compiled.asm["cubin"]:
        raise AssertionError("no machine code")
    print(compiled.asm["ptx"].count(".tf32"))  # noqa: T201


def unprepared() -> None:
    """Without a GPU, a launch in a process that was not prepared says what is missing."""
    import triton

    triton.__version__  # noqa: B018 - imported first, as a careless process would
    case = make_case([(3, 3)], group=1, head_size=16)
    for attempt in (
        prepare_triton,
        lambda: implementations("triton")["paged_attention"](*case.arguments()),
    ):
        try:
            attempt()
        except RuntimeError as error:
            print("prepare_triton" in str(error))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"compare": compare, "invariance": invariance, "compile": compile_sm90, "unprepared": unprepared}[
        sys.argv[1]
    ]()
