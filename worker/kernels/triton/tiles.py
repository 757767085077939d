"""Tiles of a product with a weight: how x and weights are loaded, dequantised and multiplied.

Functions for use inside kernels. Rows of a weight are the rows of the matrix instruction and tokens are its
columns: `out^T = weight @ x^T`. So a single token fills instructions of 64 rows as well as many do, a weight
that is dequantised goes to them from registers, and a column's bits depend on nothing but that column, the
weight and the order of K. Several tiles of tokens share one pass over the weights, each with an instruction
of its own, so that their number changes nobody's bits. Knows no launch.
"""
# ruff: noqa: N803, N806, RUF005, SIM108 - compile-time names are upper case, as Triton's own are; branches
# that it takes while it compiles are statements, and tuples are added, which it knows in every version
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(pointers, column, num_columns, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads a tile; if masked, what lies at `num_columns` and behind is 0."""
    if MASKED:
        tile = tl.load(pointers, mask=column < num_columns, other=0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def load_groups(  # type: ignore[no-untyped-def]
    pairs_ptr, pair_offset, block, NUM_GROUPS: tl.constexpr
):
    """Loads scales or mins of a block of K: per group of 32 one [rows] float32.

    They are read as pairs, since a copy that runs ahead moves no less than 4 bytes.
    """
    groups = ()
    for index in tl.static_range(NUM_GROUPS // 2):
        pair = tl.load(pairs_ptr + pair_offset + (block * (NUM_GROUPS // 2) + index))
        low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        groups = groups + (low, high)
    return groups


@triton.jit  # type: ignore[untyped-decorator]
def dequantise(  # type: ignore[no-untyped-def]
    words, scales, mins, PART: tl.constexpr, PLANE: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr
):
    """Weights [rows, 32] of one group from its plane of the words, or of a plain weight all as they are.

    A plane stays where it is in its words, 2^shift too large, and the scale makes up for that. In float32,
    where scale times quant is exact, rounded once to COMPUTE.
    """
    if KIND == "q8_0":
        # The sign is the word's own: plane 0 is moved up to it.
        if PLANE == 0:
            large = (words[PART] << 8).to(tl.float32)
        else:
            large = (words[PART] & -256).to(tl.float32)
        weights = large * (scales[PART][PLANE] * 0.00390625)[:, None]
    elif KIND == "q4_0" or KIND == "q4_1":
        FACTOR: tl.constexpr = 16**PLANE
        large = (words[PART] & (15 * FACTOR)).to(tl.float32)
        scale = (scales[PART][PLANE] * (1.0 / FACTOR))[:, None]
        if KIND == "q4_0":
            weights = (large - 8.0 * FACTOR) * scale
        else:
            weights = large * scale + mins[PART][PLANE][:, None]
    else:
        weights = words[PART]
    return weights.to(COMPUTE)


@triton.jit  # type: ignore[untyped-decorator]
def offsets_of_tokens(  # type: ignore[no-untyped-def]
    first, stride, num_tokens, BLOCK_M: tl.constexpr, ROW_TILES: tl.constexpr
):
    """Where the tokens of every tile start; beyond the last token it is read again, so no load has a mask."""
    offsets = ()
    for tile in tl.static_range(ROW_TILES):
        token = tl.minimum(first + tile * BLOCK_M + tl.arange(0, BLOCK_M), num_tokens - 1)
        offsets = offsets + (token.to(tl.int64) * stride,)
    return offsets


@triton.jit  # type: ignore[untyped-decorator]
def add_block(  # type: ignore[no-untyped-def]
    sums,
    x_ptr,
    w_ptr,
    scales_ptr,
    mins_ptr,
    token_offsets,
    row_offsets,
    pair_offsets,
    block,
    num_inputs,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_TILES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds one block of K to the sums of every part and tile of tokens; float32 is never rounded to TF32.

    Rows of quants are padded to whole blocks, so of a quantised weight only x is masked.
    """
    IS_QUANTISED: tl.constexpr = KIND == "q8_0" or KIND == "q4_0" or KIND == "q4_1"
    PLANES: tl.constexpr = BLOCK_K // 32 if IS_QUANTISED else 1
    WIDTH: tl.constexpr = BLOCK_K // PLANES
    word = block * WIDTH + tl.arange(0, WIDTH)
    words = ()
    scales = ()
    mins = ()
    for part in tl.static_range(PARTS):
        pointers = w_ptr + row_offsets[part][:, None] + word[None, :]
        words = words + (load_tile(pointers, word[None, :], num_inputs, MASKED and not IS_QUANTISED),)
        if IS_QUANTISED:
            scales = scales + (load_groups(scales_ptr, pair_offsets[part], block, PLANES),)
        if KIND == "q4_1":
            mins = mins + (load_groups(mins_ptr, pair_offsets[part], block, PLANES),)
    for plane in tl.static_range(PLANES):
        column = block * BLOCK_K + plane * WIDTH + tl.arange(0, WIDTH)
        tokens = ()
        for tile in tl.static_range(ROW_TILES):
            pointers = x_ptr + token_offsets[tile][None, :] + column[:, None]
            tokens = tokens + (load_tile(pointers, column[:, None], num_inputs, MASKED).to(COMPUTE),)
        added = ()
        for part in tl.static_range(PARTS):
            weights = dequantise(words, scales, mins, part, plane, KIND, COMPUTE)
            for tile in tl.static_range(ROW_TILES):
                before = sums[part * ROW_TILES + tile]
                added = added + (tl.dot(weights, tokens[tile], before, input_precision="ieee"),)
        sums = added
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def multiply(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    scales_ptr,
    mins_ptr,
    token_offsets,
    row_offsets,
    pair_offsets,
    first_block,
    end_block,
    num_inputs,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_TILES: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Products of tiles of tokens with parts of a weight over blocks of K in ascending order.

    Args:
        x_ptr: Tokens, any float dtype, dense along K.
        w_ptr: The weight: words of quants, or its values where KIND is a dtype.
        scales_ptr: Pairs of scales as int32, None for a plain weight.
        mins_ptr: Pairs of mins as int32, None where the kind has none.
        token_offsets: Per tile [BLOCK_M] int64, start of each token in x.
        row_offsets: Per part [BLOCK_N] int64, start of each row in the weight.
        pair_offsets: Per part [BLOCK_N] int64, start of each row of pairs.
        first_block: Block of K to start with.
        end_block: Block to end before; those up to here are whole.
        num_inputs: K.
        PARTS: Stacked weights that are multiplied at once.
        KIND: Of the weight.
        COMPUTE: What x and weights are rounded to.
        BLOCK_M: Tokens of a tile.
        BLOCK_N: Outputs of a tile.
        BLOCK_K: Elements of a block of K; of a quantised weight those of 32 words.
        ROW_TILES: Tiles of tokens.
        EVEN_K: Whether K ends at `end_block`; else the rest of K is a block under masks.

    Returns:
        PARTS * ROW_TILES sums [BLOCK_N, BLOCK_M] float32; all tiles of the first part come first.
    """
    sums = ()
    for _ in tl.static_range(PARTS * ROW_TILES):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_M], tl.float32),)
    for block in range(first_block, end_block):
        sums = add_block(
            *(sums, x_ptr, w_ptr, scales_ptr, mins_ptr, token_offsets, row_offsets, pair_offsets),
            *(block, num_inputs, PARTS, KIND, COMPUTE, BLOCK_K, ROW_TILES, False),
        )
    if not EVEN_K:
        sums = add_block(
            *(sums, x_ptr, w_ptr, scales_ptr, mins_ptr, token_offsets, row_offsets, pair_offsets),
            *(end_block, num_inputs, PARTS, KIND, COMPUTE, BLOCK_K, ROW_TILES, True),
        )
    return sums
