# ruff: noqa: PYI021, A002 - the module is C++, so its documentation has no other place; `sum` is an operand
"""Types of the native runner: weights, threads, operands and the program of launches."""

from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

class _Array(Protocol):
    """A torch tensor or NumPy array in host memory: C-contiguous and of the dtype that the argument names."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...

KERNEL_VERSION: Final[int]
"""Changes whenever the bits of a fused kernel set do; part of the fingerprint of a plan's numerics."""

LANES: Final[int]
"""Floats that kernels work on at once: head_size, block_size, offsets and row strides are multiples of it."""

MAX_HEAD_SIZE: Final[int]
"""The largest head_size of a `KvLayer` and of attention."""

MAX_THREADS: Final[int]
"""The most threads of a `Team`, the caller included."""

def kernel_sets() -> list[str]:
    """Names of the kernel sets that this machine runs, the fastest first.

    avx512amx, avx512vnni, avx512, avx2vnni, avx2, neon, baseline.
    """

def default_kernel_set() -> str:
    """The first of `kernel_sets()`."""

def is_fused(name: str) -> bool:
    """Whether the set rounds a product and a sum once; all that do give the same bits.

    Raises:
        ValueError: No set of that name, or this machine can't run it.
    """

def gguf_kinds() -> list[str]:
    """Kinds of a `GgufPart`: f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k."""

class GgufPart:
    """Rows of one tensor as a GGUF file has them. Holds the array; reads nothing.

    Args:
        kind: One of `gguf_kinds()`.
        data: uint8 [num_rows, bytes of a row]; may be read-only, a mapped file.

    Raises:
        ValueError: An unknown kind, another dtype or shape, or a row that is not whole blocks of the kind.
    """

    def __init__(self, kind: str, data: _Array) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_columns(self) -> int:
        """Elements of a row."""

class PackedMatrix:
    """Matrices stacked by rows and copied into panels of 16 rows, in the formats that they have. Immutable.

    Neighbours of one kind make one segment; parts are read once, in order, and not kept.

    Args:
        parts: float32 [n_i, K] or `GgufPart` each, with one K.

    Raises:
        ValueError: No part, another dtype, shapes that don't stack, or a part of another kind that begins
            within a panel (after rows that are no multiple of 16).
    """

    def __init__(self, parts: Sequence[_Array | GgufPart]) -> None: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_columns(self) -> int: ...
    @property
    def num_bytes(self) -> int:
        """Bytes of the panels, rows that fill up the last one included."""

    @property
    def formats(self) -> tuple[str, ...]:
        """The kind of each segment, as `gguf_kinds` names it."""

    @property
    def is_quantised(self) -> bool:
        """Whether every segment is: what int8 activations are for."""

class Team:
    """The caller and `num_threads - 1` kept threads, which spin for a moment after a run and then sleep.

    One run at a time: a second one raises RuntimeError. A child of fork() has none of the kept threads: there
    a team that has any raises RuntimeError from `close` and from runs, and may be dropped; a new one works.

    Args:
        num_threads: The caller of a run is one of them.
        cpus: The CPU that each thread stays on: kept threads from now on, a caller from its first run on, for
            good. None: threads may move.

    Raises:
        ValueError: num_threads is not 1 to `MAX_THREADS`, or `cpus` is not as many different CPUs that this
            thread may run on.
    """

    def __init__(self, num_threads: int, cpus: Sequence[int] | None = None) -> None: ...
    @property
    def num_threads(self) -> int: ...
    def close(self) -> None:
        """Ends the threads; programs of this team then refuse to run.

        Raises:
            RuntimeError: A run is under way, or this is a forked process.
        """

class View:
    """Rows of an arena: row i is `arena[offset + i * row_stride :][:width]`. Checked by launches that get it.

    Args:
        arena: float32 [n], writable.
        offset: Floats, a multiple of 16.
        row_stride: Floats, a multiple of 16 and at least the width.
        width: Floats of a row; kernels may fill it up to a multiple of 16.
        extent: What the rows are: tokens, rows or logits of a step.

    Raises:
        ValueError: Another dtype or shape, or an unknown extent.
    """

    def __init__(
        self, arena: _Array, offset: int, row_stride: int, width: int, extent: Literal["T", "R", "L"]
    ) -> None: ...

class KvLayer:
    """Keys or values of one layer, in blocks within the pool. Checked by the launch that gets it.

    Block b of head h starts at byte `offset + b * block_stride + h * head_stride`. A key block holds element
    d of token t at `d * block_size + t`, a value block at `t * head_size + d`. Behind those of int8 lie their
    tokens' scales, [block_size] float32.

    Args:
        data: uint8 [n], the whole pool, writable.
        offset: Bytes to block 0, head 0.
        num_blocks: Blocks of the pool.
        block_stride: Bytes from a block to the next.
        head_stride: Bytes from a head to the next.
        num_kv_heads: Heads of keys and values.
        head_size: A multiple of `LANES` up to `MAX_HEAD_SIZE`.
        block_size: Tokens of a block, a multiple of `LANES`.
        dtype: What elements are kept as: float32, float16, bfloat16 or int8.

    Raises:
        ValueError: Another dtype of `data` or another number of dimensions, or an unknown dtype.
    """

    def __init__(
        self,
        data: _Array,
        offset: int,
        num_blocks: int,
        block_stride: int,
        head_stride: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        dtype: str = "float32",
    ) -> None: ...

class Program:
    """A step's launches in order, bound to their memory once and run many times.

    Each launch method checks its operands for the whole capacity and raises ValueError that names the
    argument; the program is as before then. All that an operand points to is kept alive. What index arrays
    hold (token ids, positions, slots, blocks) is read at each run and not checked; query_start and
    context_len are.

    Args:
        team: Who runs it.
        max_tokens: Tokens of a step at most.
        max_rows: Rows of a step at most, and rows of logits.
        kernel_set: One of `kernel_sets()`; the fastest by default.
        activations: "float32"; "int8", in which products with quantised weights take their x as rounded to
            eight bits by row and group of 32; or "bfloat16", to which both sides of every product are
            rounded, of attention too. Sums, norms and what lies between are float32.

    Raises:
        ValueError: A size below 1, a kernel set that is unknown or not for this machine, other activations.
    """

    def __init__(
        self,
        team: Team,
        *,
        max_tokens: int,
        max_rows: int,
        kernel_set: str | None = None,
        activations: Literal["float32", "int8", "bfloat16"] = "float32",
    ) -> None: ...
    def embedding(self, weight: PackedMatrix, token_ids: _Array, out: View) -> None:
        """Row token_ids[t] of the weight, which has one format; token_ids is int32 [max_tokens]."""

    def rms_norm(self, x: View, weight: _Array, eps: float, out: View) -> None:
        """`x / sqrt(mean(x^2) + eps) * weight`; weight is float32 [width]."""

    def add_rms_norm(self, x: View, y: View, weight: _Array, eps: float, sum: View, out: View) -> None:
        """`sum = x + y`, `out = rms_norm(sum)`."""

    def add(self, x: View, y: View, out: View) -> None:
        """`x + y`."""

    def swiglu(self, gate: View, up: View, out: View) -> None:
        """`silu(gate) * up`."""

    def select_rows(self, x: View, index: _Array, out: View) -> None:
        """`x[index]`; index is int32, an entry for each row that `out` may have."""

    def linear(self, x: View, weight: PackedMatrix, out: View) -> None:
        """`x @ weight.T`; a row's bits do not depend on the others."""

    def linear_swiglu(self, x: View, weight: PackedMatrix, out: View) -> None:
        """`silu(x @ gate.T) * (x @ up.T)`, gate being the weight's first half, a multiple of 16 rows.

        The weight has one format.
        """

    def rope(self, x: View, position: _Array, cos: _Array, sin: _Array, out: View) -> None:
        """Turns each head's pairs; position int32 [max_tokens], cos and sin float32 [n, head_size / 2]."""

    def store_kv(self, k: View, v: View, slot_mapping: _Array, keys: KvLayer, values: KvLayer) -> None:
        """Writes to slots, each block * block_size + token; slot_mapping is int64 [max_tokens]."""

    def rope_store(
        self,
        q: View,
        k: View,
        v: View,
        position: _Array,
        slot_mapping: _Array,
        cos: _Array,
        sin: _Array,
        keys: KvLayer,
        values: KvLayer,
        out: View,
    ) -> None:
        """`out = rope(q)`; stores rope(k) and v as `store_kv` does."""

    def paged_attention(
        self,
        q: View,
        keys: KvLayer,
        values: KvLayer,
        block_table: _Array,
        context_len: _Array,
        query_start: _Array,
        scale: float,
        out: View,
    ) -> None:
        """Causal attention of each row's tokens over its blocks; rows without tokens are skipped.

        block_table is int32 [max_rows, n], context_len int32 [max_rows], query_start int32 [max_rows + 1].
        """

    def dense_attention(
        self,
        q: View,
        keys: _Array,
        values: _Array,
        context_len: _Array,
        query_start: _Array,
        scale: float,
        out: View,
    ) -> None:
        """The same loop for one row without a block table, to measure what paging costs.

        keys and values are float32 [num_kv_heads, context, head_size]; keys are copied into panels of 16
        tokens.
        """

    def run(self, num_tokens: int, num_rows: int, num_logits: int) -> int:
        """Runs all launches, without the GIL.

        Returns:
            Time in launches' bodies in ns, each as its longest thread took it.

        Raises:
            ValueError: A size beyond the capacity, or query_start or context_len that don't fit the sizes;
                nothing has run then.
            RuntimeError: The team is closed or at work, or its threads are another process's.
        """

    def run_and_draw(
        self,
        num_tokens: int,
        num_rows: int,
        num_logits: int,
        sampler: Sampler,
        num_draws: int,
        entries: _Array | None = None,
    ) -> tuple[int, int, list[int]]:
        """As `run`, and then as `Sampler.draw`, in one go: threads go on from the launches to the draws.

        Args:
            num_tokens: As of `run`, like the next two.
            num_rows: Live rows.
            num_logits: Live rows of logits.
            sampler: Of the same team.
            num_draws: As `num_rows` of `Sampler.draw`.
            entries: As of `Sampler.draw`.

        Returns:
            Time in launches' bodies, and time in draws, in ns, each as its longest thread took it; the
            sampler's ids of the draws.

        Raises:
            ValueError: As `run` and `Sampler.draw`, or the sampler is of another team; nothing has run then.
            RuntimeError: As `run`.
        """

    @property
    def num_launches(self) -> int:
        """One for each launch method that was called."""

    @property
    def kernel_set(self) -> str: ...
    @property
    def activations(self) -> str: ...
    @property
    def launch_ns(self) -> list[int]:
        """Of the last run, launch by launch, as its longest thread took it."""

    @property
    def busy_ns(self) -> int:
        """Of the last run, time in bodies as a mean over threads: without what they waited for each other."""

class Sampler:
    """Draws the tokens of a step from its rows of logits, where they lie, each row alone.

    What a draw is, and its words, are those of `worker.kernels.reference.logits_sample` and
    `worker.kernels.draw_words`, the `SLOT` apart, which is not read; weights are float64. A row's logits are
    changed by its entries for the draw and are as before when it is done. All arrays are kept alive.

    Args:
        team: Who draws.
        logits: float32 [rows, width], writable; rows may lie further apart than they are wide.
        draws: int32 [at least rows, DRAW_WORDS], at a multiple of 8 bytes.
        ids: int32 [at least rows], written: the drawn token; -1 where none can be told (a logit is NaN or
            infinite, or all ids are banned) or none was asked for.
        logprobs: float32 [at least rows], written: its log softmax by the logits as they are; NaN unless
            asked for.
        vocab_size: Ids from here on are never drawn; 1 to the width.
        kernel_set: One of `kernel_sets()`; the fastest by default. Sets that fuse give the same bits.

    Raises:
        ValueError: An array of another dtype or shape, or a size out of range; names the argument.
    """

    def __init__(
        self,
        team: Team,
        logits: _Array,
        draws: _Array,
        ids: _Array,
        logprobs: _Array,
        *,
        vocab_size: int,
        kernel_set: str | None = None,
    ) -> None: ...
    def draw(self, num_rows: int, entries: _Array | None = None) -> None:
        """Draws for the first `num_rows` rows, without the GIL.

        Args:
            num_rows: Live rows; those without flags draw nothing.
            entries: int32 [n, ENTRY_WORDS], at a multiple of 8 bytes; None: there are none.

        Raises:
            ValueError: A row's words or an entry can't be, or `num_rows` is more than there are; nothing was
                drawn.
            RuntimeError: The team is closed or at work, or its threads are another process's.
        """
