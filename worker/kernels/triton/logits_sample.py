"""Draws the tokens of a step where its logits lie, in Triton."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker.kernels import draw_words as words
from worker.kernels.triton.compile_case import CompileCase
from worker.kernels.triton.logits_draw import logits_draw_kernel
from worker.kernels.triton.logits_scan import FIELDS, logits_scan_kernel
from worker.kernels.triton.rows import check_rows, check_shape, compile_case
from worker.kernels.triton.targets import Target, target_of

GROUP = 128
"""Logits of a group, what a draw reads again: 512 bytes, and 1,002 groups of a vocabulary of 128,256."""
CHUNK = 2048
"""Logits of a scan's program: one row of 128,256 is spread over 63 of them."""
TILES = {
    "sm_80": (4096, 16),
    "sm_90": (4096, 8),
    "sm_100": (2048, 8),
    "gfx942": (2048, 8),
    "interpreter": (4096, 8),
}
"""Candidates that a filter looks at side by side, and warps of the draw: so many that nothing is spilled."""
MOST_CANDIDATES = 8192
"""Ids of candidates that are listed; where more are left by the first bound, filters read the whole row."""
ENTRY_BLOCK = 256
"""Entries that are applied side by side."""
_WORDS = {
    name: getattr(words, name)
    for name in (
        *("DRAW_WORDS", "ENTRY_WORDS", "FLAGS", "SLOT", "FIRST_ENTRY", "NUM_ENTRIES", "TOP_K", "POSITION"),
        *(
            "SEED",
            "TEMPERATURE",
            "TOP_P",
            "MIN_P",
            "REPETITION",
            "INVERSE_REPETITION",
            "GREEDY",
            "WANTS_LOGPROB",
        ),
    )
}
_FIELDS = int(FIELDS.value)


@dataclass(frozen=True, slots=True)
class SampleWorkspace:
    """Memory of a draw, written by each.

    Attributes:
        groups: [L, 4, groups] float32, what the scan finds.
        selected: [L, groups] int32.
        candidates: [L, MOST_CANDIDATES] int32.
        raw: [entries] float32, logits before their entries.
    """

    groups: Tensor
    selected: Tensor
    candidates: Tensor
    raw: Tensor


def sample_workspace(
    *, num_rows: int, num_entries: int, vocab_size: int, device: torch.device
) -> SampleWorkspace:
    """Memory for draws of up to `num_rows` rows that have up to `num_entries` entries together."""
    num_groups = triton.cdiv(vocab_size, GROUP)
    return SampleWorkspace(
        torch.empty(num_rows, _FIELDS, num_groups, device=device),
        torch.empty(num_rows, num_groups, dtype=torch.int32, device=device),
        torch.empty(num_rows, MOST_CANDIDATES, dtype=torch.int32, device=device),
        torch.empty(num_entries, device=device),
    )


def logits_sample(
    logits: Tensor,
    draws: Tensor,
    entries: Tensor,
    fed: Tensor,
    *,
    vocab_size: int,
    workspace: SampleWorkspace | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws a token per row as `worker.sampling` does, up to margins at rounding: two launches, no sort.

    The first reads all logits once, with entries applied to them in place: the largest of each group of 128,
    the group's weights `exp((x - largest) / temperature)`, and whether all are finite. The second, one
    program per row, reads those. Greedy and unfiltered draws then read one group of logits. top_k and top_p
    find a key that all kept candidates reach from the groups' largest logits alone, list what reaches it
    from the groups that do, and bisect the bits of float32 over that list for the exact threshold; min_p is
    a threshold by itself. The draw is by inverse of the cumulative weights in the order of ids, with the
    Philox number of (seed, position). Weights are float32, sums over groups and candidates float64. Every
    row is computed alone and in one order.

    Moves `L * vocab_size * 4` bytes, 16 to 20 bytes per group, and what filters list.

    Source: worker/sampling.py tells what is drawn; the bisection is this project's own.

    Args:
        logits: [L, at least vocab_size] float32, each row dense; those of entries are changed.
        draws: [L, DRAW_WORDS] int32, dense, see `worker.kernels.draw_words`; at an address that is a multiple
            of 8 bytes.
        entries: [all entries, ENTRY_WORDS] int32, dense, aligned as `draws`.
        fed: [slots] int32; the id is written to the row's slot if it has one.
        vocab_size: Ids from here on are padding, never drawn.
        workspace: From `sample_workspace`, for at least these sizes. None: a new one.
        out: Token ids [L] int32 and logprobs [L] float32. None: new ones.

    Returns:
        `out`. A token id is -1 where none can be told (a logit is NaN or infinite, or all are banned) or none
        was asked for; the logprob, by the raw logits, is NaN there and where it was not asked for.

    Raises:
        ValueError: A shape, stride or alignment is wrong, or the workspace too small.
        RuntimeError: The tensors are on the CPU and the kernel is compiled for a GPU.
    """
    num_rows, device = len(logits), logits.device
    num_groups = triton.cdiv(vocab_size, GROUP)
    if workspace is None:
        workspace = sample_workspace(
            num_rows=num_rows, num_entries=len(entries), vocab_size=vocab_size, device=device
        )
    if out is None:
        ids = torch.empty(num_rows, dtype=torch.int32, device=device)
        out = ids, torch.empty(num_rows, device=device)
    token_ids, logprobs = out
    check_rows(
        logits_scan_kernel,
        logits=logits,
        draws=draws,
        entries=entries,
        fed=fed,
        token_ids=token_ids,
        logprobs=logprobs,
    )
    if not 0 < vocab_size <= logits.shape[1]:
        raise ValueError(f"vocab_size={vocab_size} is not in 1..{logits.shape[1]}, the width of logits")
    check_shape("draws", draws, (num_rows, words.DRAW_WORDS))
    check_shape("entries", entries, (len(entries), words.ENTRY_WORDS))
    for name, value in (("draws", draws), ("entries", entries)):
        if not value.is_contiguous() or value.data_ptr() % 8:
            raise ValueError(f"{name} is not dense, or its address no multiple of 8 bytes")
    for name, value in (("out[0]", token_ids), ("out[1]", logprobs)):
        check_shape(name, value, (num_rows,))
    if len(workspace.candidates) < num_rows or len(workspace.raw) < len(entries):
        raise ValueError(
            f"workspace has room for {len(workspace.candidates)} rows and {len(workspace.raw)} entries, "
            f"{num_rows} and {len(entries)} are needed"
        )
    check_shape("workspace.groups[0]", workspace.groups[0:1], (1, _FIELDS, num_groups))
    if num_rows:
        logits_scan_kernel[(num_rows, triton.cdiv(vocab_size, CHUNK))](
            logits,
            draws,
            entries,
            workspace.raw,
            workspace.groups,
            logits.stride(0),
            **_scan_constants(vocab_size),
        )
        logits_draw_kernel[(num_rows,)](
            logits,
            draws,
            entries,
            workspace.raw,
            workspace.groups,
            workspace.selected,
            workspace.candidates,
            fed,
            token_ids,
            logprobs,
            logits.stride(0),
            **_draw_constants(target_of(device), vocab_size),
        )
    return out


def _scan_constants(vocab_size: int) -> Mapping[str, int]:
    return _words_of(logits_scan_kernel.arg_names) | {
        "VOCAB_SIZE": vocab_size,
        "GROUP": GROUP,
        "CHUNK": CHUNK,
        "ENTRY_BLOCK": ENTRY_BLOCK,
        "num_warps": 4,
    }


def _draw_constants(target: Target, vocab_size: int) -> Mapping[str, int]:
    tile, num_warps = TILES[target.name]
    return _words_of(logits_draw_kernel.arg_names) | {
        "VOCAB_SIZE": vocab_size,
        "GROUP": GROUP,
        "SLOTS": triton.next_power_of_2(triton.cdiv(vocab_size, GROUP)),
        "TILE": tile,
        "MOST": MOST_CANDIDATES,
        "ENTRY_BLOCK": ENTRY_BLOCK,
        "num_warps": num_warps,
    }


def _words_of(arguments: list[str]) -> dict[str, int]:
    return {name: word for name, word in _WORDS.items() if name in arguments}


def compile_cases(target: Target) -> list[CompileCase]:
    """Both kernels, for the vocabularies of Llama 2 and 3, and for one of 2^18, the largest in use."""
    floats = ("logits_ptr", "raw_ptr", "groups_ptr", "logprobs_ptr")
    integers = ("draws_ptr", "entries_ptr", "selected_ptr", "candidates_ptr", "fed_ptr", "token_ids_ptr")
    pointers: dict[str, torch.dtype | str] = {
        **dict.fromkeys(floats, torch.float32),
        **dict.fromkeys(integers, "i32"),
    }
    kernels = [
        (f"{name} vocabulary={size}", kernel, constants, size == 128256 or (size, name) == (262144, "scan"))
        for size in (32000, 128256, 262144)
        for name, kernel, constants in (
            ("scan", logits_scan_kernel, _scan_constants(size)),
            ("draw", logits_draw_kernel, _draw_constants(target, size)),
        )
    ]
    return [
        compile_case(
            "logits_sample",
            label,
            target,
            kernel,
            pointers={name: kind for name, kind in pointers.items() if name in kernel.arg_names},
            constants=constants,
            divisible=("logits_stride",),
            is_named=is_named,
        )
        for label, kernel, constants, is_named in kernels
    ]
