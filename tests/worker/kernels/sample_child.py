"""What test_triton_logits_sample.py runs under Triton's interpreter, in a process of its own."""

import sys
from dataclasses import replace

import numpy as np
import torch

from tests.worker.kernels.sample_cases import NOT_BANNED, SampleCase, any_draw, make_case
from worker.kernels.triton import prepare_triton
from worker.params import Sampling
from worker.sampling import Draw, draw_tokens, uniform

prepare_triton()

import triton  # noqa: E402 - what it reads must be there first
import triton.language as tl  # noqa: E402

from worker.kernels.triton.logits_sample import GROUP, logits_sample, sample_workspace  # noqa: E402
from worker.kernels.triton.philox import uniform as device_uniform  # noqa: E402


def drawn(case: SampleCase) -> tuple[list[int], list[float]]:
    """Ids and logprobs of the kernels; what they write beside these is held against them."""
    logits, draws, entries, fed = case.arguments()
    before = draws.clone(), entries.clone()
    out = torch.full((len(draws),), -9, dtype=torch.int32), torch.full((len(draws),), 7.0)
    workspace = sample_workspace(
        num_rows=len(draws),
        num_entries=len(entries),
        vocab_size=case.vocab_size,
        device=torch.device("cpu"),
    )
    for memory in (workspace.groups, workspace.raw):
        memory.fill_(float("nan"))
    for memory in (workspace.selected, workspace.candidates):
        memory.fill_(-(2**31))
    result = logits_sample(
        logits, draws, entries, fed, vocab_size=case.vocab_size, workspace=workspace, out=out
    )
    assert result is out
    assert torch.equal(fed, torch.cat([out[0], torch.tensor([-7], dtype=torch.int32)]))
    assert torch.equal(draws, before[0])
    assert torch.equal(entries, before[1])
    padding, was = logits[:, case.vocab_size :], case.logits[:, case.vocab_size :]
    torch.testing.assert_close(padding, was, rtol=0, atol=0, equal_nan=True)
    return out[0].tolist(), out[1].tolist()


def check(case: SampleCase) -> int:
    """The kernels draw what the host draws; returns the number of rows."""
    token_ids, logprobs = drawn(case)
    expected = draw_tokens(list(case.logits.numpy()), case.given, vocab_size=case.vocab_size)
    for row, want in enumerate(expected):
        told = f"row {row} of {case.vocab_size}: {case.given[row]}"
        assert token_ids[row] == (-1 if want is None else want.token_id), told
        if want is None or want.logprob is None:
            assert np.isnan(logprobs[row]), told
        else:
            assert abs(logprobs[row] - want.logprob) < 2e-5, told
    return len(expected)


def any_rows(sizes: dict[int, int], seed: int) -> int:
    """Random rows and parameters; of the vocabularies some are no multiple of a group, or have padding."""
    random = np.random.default_rng(seed)
    num_rows = 0
    for vocab_size, count in sizes.items():
        width = vocab_size + int(random.integers(0, 9))
        logits = random.normal(scale=3.0, size=(count, width)).astype(np.float32)
        logits[::3] = np.round(logits[::3])  # ties by the dozen
        logits[:, vocab_size:] = 1e4
        given = [any_draw(random, vocab_size) for _ in range(count)]
        num_rows += check(make_case(torch.from_numpy(logits), given, vocab_size=vocab_size))
    return num_rows


def compare() -> None:
    """Against `worker.sampling.draw_tokens`."""
    print(any_rows({1: 2, 2: 3, 127: 5, 129: 17, 300: 8, 2049: 5}, seed=1))  # noqa: T201


def compare_long() -> None:
    """More of it, over a vocabulary of many chunks too."""
    rows = any_rows({5: 16, 128: 48, 257: 64, 1000: 32, 4097: 16}, seed=2)
    print(rows + any_rows({33000: 6}, seed=9))  # noqa: T201


def borders() -> None:
    """Forced ties, rows without an answer, rows that nothing is drawn for, and lists that overflow."""
    count = 0

    def rows(logits, *given: Draw, vocab_size: int | None = None) -> None:
        nonlocal count
        tensor = torch.as_tensor(np.asarray(logits, np.float32))
        tensor = tensor.expand(len(given), -1).clone() if tensor.dim() == 1 else tensor
        count += check(make_case(tensor, given, vocab_size=vocab_size or tensor.shape[1]))

    plain = Sampling(1.0, logprobs=0)
    equal = np.zeros(200)
    rows(
        equal,
        *(
            Draw(replace(plain, seed=seed, **filters), [0] * seed, 0, NOT_BANNED)
            for seed in (1, 2)
            for filters in (
                {"top_k": 3},
                {"top_p": 0.5},
                {"top_p": 0.25, "top_k": 100},
                {"min_p": 1.0},
                {"top_k": 150, "top_p": 0.5, "min_p": 0.5},
                {"temperature": 0.0},
            )
        ),
    )
    # Both zeros are one tie, as are equal sums of a logit and its bias.
    zeros = np.array([-0.0, 0.0, -0.0, 0.0, -1.0])
    rows(zeros, *(Draw(replace(plain, top_k=2, seed=seed), [], 0, NOT_BANNED) for seed in range(4)))
    rows(zeros, Draw(Sampling(logit_bias={4: 1.0, 0: -0.5, 1: -0.5, 2: -0.5, 3: -0.5}), [], 0, NOT_BANNED))

    everything = frozenset(range(5))
    rows(
        zeros,
        Draw(plain, [], 0, everything),
        Draw(Sampling(), [], 0, everything),
        Draw(plain, [], 0, frozenset({0, 1, 2, 3})),
        Draw(replace(plain, top_k=4), [], 0, frozenset({0, 1, 2})),
    )
    bad = np.tile(np.arange(GROUP * 2 + 1, dtype=np.float32) / 100, (7, 1))
    bad[0, 5], bad[1, 200], bad[2, -1], bad[3, 256] = np.nan, np.inf, -np.inf, np.nan
    bad[4, 256] = np.nan  # padding there
    rows(bad[:4], *[Draw(plain, [], 0, frozenset({5, 256}))] * 4)
    rows(bad[4:], *[Draw(plain, [], 0, NOT_BANNED)] * 3, vocab_size=256)

    # More candidates reach the first bound than are listed, all of them equal but for a few.
    many = np.zeros(9000)
    many[[17, 8000]] = 0.5
    rows(
        many,
        Draw(Sampling(1.0, top_p=0.95, seed=3), [], 0, NOT_BANNED),
        Draw(Sampling(1.0, top_k=20, top_p=0.9, seed=5), [], 0, NOT_BANNED),
        Draw(Sampling(1.0, min_p=0.3, seed=6), [], 0, NOT_BANNED),
    )

    case = make_case(torch.zeros(3, 40), [Draw(plain, [], 0, NOT_BANNED)] * 3, vocab_size=40)
    case.draws[1] = 0
    case.draws[2, 1] = -1
    logits, draws, entries, fed = case.arguments()
    ids, logprobs = logits_sample(logits, draws, entries, fed, vocab_size=40)
    assert ids[1] == -1
    assert logprobs[1].isnan()
    assert ids[0] >= 0
    assert fed.tolist() == [ids[0], -7, -7, -7]
    print(count)  # noqa: T201


def invariance() -> None:
    """Rows alone, and in another order, are the bits that they are together; strided rows too."""
    random = np.random.default_rng(7)
    logits = torch.from_numpy(random.normal(scale=3.0, size=(17, 300)).astype(np.float32))
    given = [any_draw(random, 290) for _ in range(17)]
    case = make_case(logits, given, vocab_size=290)
    ids, logprobs = drawn(case)
    bits = np.array(logprobs, np.float32).view(np.int32)
    for which in ([5], [0], [16, 3], list(range(16, -1, -1))):
        some = case.rows(*which)
        some.logits = some.logits.repeat(1, 2)[:, :300]
        assert not some.logits.is_contiguous() or len(which) == 1
        alone, their = drawn(some)
        assert alone == [ids[row] for row in which]
        assert (np.array(their, np.float32).view(np.int32) == bits[which]).all()
    print(len(set(ids)) > 5)  # noqa: T201


@triton.jit
def uniform_kernel(seed_ptr, position_ptr, out_ptr):
    index = tl.program_id(0)
    number = device_uniform(tl.load(seed_ptr + index), tl.load(position_ptr + index))
    tl.store(out_ptr + index, number)


def numbers() -> None:
    """The numbers are the host's, to the last bit; and draws by them follow the distribution."""
    random = np.random.default_rng(5)
    ends = np.array([0, 1, 2**64 - 1, 2**63], np.uint64)
    seeds = np.concatenate([ends, random.integers(0, 2**64, 60, dtype=np.uint64)])
    positions = random.integers(0, 2**31, 64).astype(np.int32)
    positions[:2] = 0
    out = torch.empty(64, dtype=torch.float64)
    uniform_kernel[(64,)](torch.from_numpy(seeds), torch.from_numpy(positions), out)
    expected = [uniform(int(seed), 0, int(at)) for seed, at in zip(seeds, positions, strict=True)]
    assert out.tolist() == expected

    logits = random.normal(scale=0.7, size=6).astype(np.float32)
    total = 200
    given = [Draw(Sampling(0.9, seed=seed), [1, 2], 0, NOT_BANNED) for seed in range(total)]
    ids, _ = drawn(make_case(torch.from_numpy(np.tile(logits, (total, 1))), given, vocab_size=6))
    weights = np.exp(logits.astype(np.float64) / 0.9)
    wanted = total * weights / weights.sum()
    found = np.bincount(ids, minlength=6)
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    assert statistic < 20.5, statistic  # 1 in 1,000 by chance, at 5 degrees of freedom
    print(64, total)  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    tasks = (compare, compare_long, borders, invariance, numbers)
    for name in sys.argv[1].split(","):
        next(task for task in tasks if task.__name__ == name)()
