"""The random number of a draw, on the device."""

import triton
import triton.language as tl


@triton.jit
def uniform(seed, position):  # type: ignore[no-untyped-def]
    """The number in [0, 1) of a seed and a position, stream 0, as `worker.sampling.uniform` has it.

    Philox4x64-10 with key (seed, 0) and counter (1, 0, position, 0): NumPy counts up before it draws. The
    result is the top 53 bits of the first word.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    Args:
        seed: Scalar uint64.
        position: Scalar integer.

    Returns:
        Scalar float64.
    """
    key0 = seed
    key1 = tl.zeros([], tl.uint64)
    c0 = tl.full([], 1, tl.uint64)
    c1 = tl.zeros([], tl.uint64)
    c2 = position.to(tl.uint64)
    c3 = tl.zeros([], tl.uint64)
    factor0 = tl.full([], 0xD2E7470EE14C6C93, tl.uint64)
    factor1 = tl.full([], 0xCA5A826395121157, tl.uint64)
    step0 = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    step1 = tl.full([], 0xBB67AE8584CAA73B, tl.uint64)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(factor0, c0)
        high1 = tl.umulhi(factor1, c2)
        low0 = factor0 * c0
        low1 = factor1 * c2
        c0 = high1 ^ c1 ^ key0
        c1 = low1
        c2 = high0 ^ c3 ^ key1
        c3 = low0
        key0 += step0
        key1 += step1
    return (c0 >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)
