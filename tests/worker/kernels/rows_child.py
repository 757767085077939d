"""What test_triton_rows.py and test_triton_bind_step.py run under the interpreter."""

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.numerics import bits
from worker.kernels.draw_words import DRAW_WORDS
from worker.kernels.reference import add as plain_add
from worker.kernels.reference import add_rms_norm as plain_add_rms_norm
from worker.kernels.reference import bind_step as plain_bind_step
from worker.kernels.reference import rms_norm as plain_rms_norm
from worker.kernels.reference import swiglu as plain_swiglu
from worker.kernels.triton import prepare_triton
from worker.plan.graph import StepInputs
from worker.plan.staging_layout import StagingLayout, unknown_token

prepare_triton()

from worker.kernels.triton.add import add  # noqa: E402 - the interpreter is chosen first
from worker.kernels.triton.add_rms_norm import add_rms_norm  # noqa: E402
from worker.kernels.triton.bind_step import bind_step  # noqa: E402
from worker.kernels.triton.rms_norm import rms_norm  # noqa: E402
from worker.kernels.triton.select_rows import select_rows  # noqa: E402
from worker.kernels.triton.swiglu import swiglu  # noqa: E402

EPS = 1e-5
SHAPES = ((1, 1), (3, 53), (17, 576), (2, 1024), (5, 1040))
WIDE = (2, 16384 + 70)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def apart(value: Tensor) -> Tensor:
    """The same values in rows that are apart by more than their width, NaN between them."""
    memory = torch.full((*value.shape[:-1], value.shape[-1] + 13), float("nan"), dtype=value.dtype)
    memory[..., : value.shape[-1]] = value
    return memory[..., : value.shape[-1]]


def poisoned(num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return apart(torch.full((num_rows, width), float("nan"), dtype=dtype))


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-3 if found.dtype == torch.float16 else 2e-6
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def compare() -> None:
    """Every row kernel against its twin: planes, dtypes, rows apart, the wide form, results in place."""
    count = 0
    for num_rows, width in (*SHAPES, WIDE):
        x, y, weight = draw(num_rows, width), draw(num_rows, width, seed=1), draw(width, seed=2)
        planes = draw(3, num_rows, width, seed=3)
        for dtype in (torch.float32, torch.float16):
            out = poisoned(num_rows, width, dtype)
            assert rms_norm(apart(x), weight, EPS, out=out) is out
            close(out, plain_rms_norm.rms_norm(x, weight, EPS))
            out = poisoned(num_rows, width, dtype)
            close(swiglu(apart(x), apart(y), out=out), plain_swiglu.swiglu(x, y))
            for other in (y, planes):
                total, normed = poisoned(num_rows, width), poisoned(num_rows, width, dtype)
                add_rms_norm(apart(x), apart(other), weight, EPS, out=(total, normed))
                expected = plain_add_rms_norm.add_rms_norm(x, other, weight, EPS)
                assert torch.equal(bits(total.contiguous()), bits(expected[0]))
                close(normed, expected[1])
                count += 1
        close(swiglu(x.half(), y.half()), plain_swiglu.swiglu(x.half().float(), y.half().float()))
        for other in (y, planes):
            expected = plain_add.add(x, other)
            assert torch.equal(bits(add(apart(x), apart(other))), bits(expected))
            here = x.clone()
            assert torch.equal(bits(add(here, other, out=here)), bits(expected))
        here = x.clone()
        add_rms_norm(here, y, weight, EPS, out=(here, torch.empty_like(x)))
        assert torch.equal(bits(here), bits(x + y))
        index = torch.tensor([num_rows - 1, 0, num_rows - 1], dtype=torch.int32)
        for values in (x, x.half()):
            out = poisoned(3, width, values.dtype)
            assert torch.equal(select_rows(apart(values), index, out=out), values[index.long()])
    assert rms_norm(torch.empty(0, 8), torch.ones(8), EPS).shape == (0, 8)
    print(count)  # noqa: T201


def invariance() -> None:
    """A row's bits alone are those among others."""
    x, y, planes = draw(9, 200), draw(9, 200, seed=1), draw(2, 9, 200, seed=2)
    weight = draw(200, seed=3)
    operators: tuple[Callable[[slice], Tensor], ...] = (
        lambda rows: rms_norm(x[rows], weight, EPS),
        lambda rows: add_rms_norm(x[rows], planes[:, rows], weight, EPS)[1],
        lambda rows: add(x[rows], planes[:, rows]),
        lambda rows: swiglu(x[rows], y[rows]),
    )
    for operator in operators:
        together = operator(slice(0, 9))
        for row in (0, 4, 8):
            assert torch.equal(bits(operator(slice(row, row + 1))[0]), bits(together[row]))
    print(len(operators))  # noqa: T201


def refusals() -> None:
    """What does not fit is named."""
    x = draw(2, 8)
    for call, name in (
        (lambda: rms_norm(x, torch.ones(7), EPS), "weight"),
        (lambda: rms_norm(x.T, torch.ones(2), EPS), "x"),
        (lambda: add(x, draw(3, 8)), "y"),
        (lambda: swiglu(x, x, out=torch.empty(2, 9)), "out"),
        (lambda: add_rms_norm(x, x, torch.ones(8), EPS, out=(x, torch.empty(1, 8))), "normed"),
        (lambda: select_rows(x, torch.zeros(1, dtype=torch.int32), out=torch.empty(2, 8)), "out"),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            call()
    print("named")  # noqa: T201


MAX_BLOCKS = 300
NUM_SLOTS = 12
BLOCK_SIZE = 16


class Device:
    """What steps leave behind on a device, of one implementation of `bind_step`."""

    def __init__(self, bind: Callable[..., None]) -> None:
        self.bind = bind
        self.block_table = torch.full((NUM_SLOTS, MAX_BLOCKS + 5), -5, dtype=torch.int32)
        self.fed = torch.tensor([40 + slot for slot in range(NUM_SLOTS - 1)] + [-1], dtype=torch.int32)
        self.staging = torch.full((20_000,), 1_000_003, dtype=torch.int32)

    def step(self, layout: StagingLayout, words: np.ndarray, num_words: int, **bucket: int) -> StepInputs:
        self.staging[:num_words] = torch.from_numpy(words[:num_words])
        tokens, rows, logits = bucket["num_tokens"], bucket["num_rows"], bucket["num_logits"]
        inputs = StepInputs(
            torch.full((tokens + 3,), -77, dtype=torch.int32),
            torch.full((tokens + 3,), -77, dtype=torch.int32),
            torch.full((tokens + 3,), -77, dtype=torch.int64),
            torch.full((rows + 3, MAX_BLOCKS), -77, dtype=torch.int32),
            torch.full((rows + 3,), -77, dtype=torch.int32),
            torch.full((rows + 4,), -77, dtype=torch.int32),
            torch.full((logits + 3,), -77, dtype=torch.int32),
        )
        self.bind(self.staging, layout, inputs, self.block_table, self.fed, block_size=BLOCK_SIZE, **bucket)
        return inputs


def write_step(
    random: np.random.Generator, layout: StagingLayout, tables: np.ndarray, counts: list[int]
) -> tuple[np.ndarray, int]:
    """One step of rows of so many tokens, over sessions whose whole tables are `tables`."""
    words = np.full(layout.num_words, 1_000_007, np.int32)
    num_rows, num_tokens = len(counts), sum(counts)
    slots = random.permutation(NUM_SLOTS)[:num_rows].astype(np.int32)
    num_logits = int(random.integers(0, num_rows + 1))
    starts = np.cumsum([0, *counts])
    contexts = [count + int(random.integers(0, BLOCK_SIZE * MAX_BLOCKS - count + 1)) for count in counts]
    updates: list[int] = []
    for row, slot in enumerate(slots):
        first = int(random.integers(0, MAX_BLOCKS))
        length = int(random.choice([0, 0, 1, min(270, MAX_BLOCKS - first)]))
        words[layout.update_first + row] = first
        words[layout.update_start + row] = len(updates)
        tables[slot, first : first + length] = random.integers(0, 10_000, length)
        updates += tables[slot, first : first + length].tolist()
    words[layout.update_start + num_rows] = len(updates)
    token_ids = random.integers(0, 1000, num_tokens)
    token_ids[starts[1:] - 1] = [unknown_token(int(slot)) if random.integers(2) else 3 for slot in slots]
    for offset, numbers in (
        (layout.header, [num_tokens, num_rows, num_logits, 0]),
        (layout.token_ids, token_ids),
        (layout.position, random.integers(0, 4000, num_tokens)),
        (layout.slot_mapping, random.integers(0, 2**31, num_tokens)),
        (layout.query_start, starts),
        (layout.context_len, contexts),
        (layout.row_slot, slots),
        (layout.logits_index, random.integers(0, num_tokens, num_logits)),
        (layout.draws, np.arange(1, num_logits * DRAW_WORDS + 1)),
        (layout.updates, updates),
    ):
        words[offset : offset + len(numbers)] = numbers
    return words, layout.updates + len(updates)


def bind() -> None:
    """Steps of any size one after the other, each unpacked by the kernel as by its twin."""
    random = np.random.default_rng(3)
    found, expected = Device(bind_step), Device(plain_bind_step.bind_step)
    tables = np.full((NUM_SLOTS, MAX_BLOCKS + 5), -5, np.int32)
    num_steps = 0
    for counts in ([1], [1] * 8, [300, 1, 7], [5], [2, 2, 1], [600], [1, 1], [1] * 12):
        room = 1 << (sum(counts) - 1).bit_length()
        bucket = {"num_tokens": room, "num_rows": min(room, 12), "num_logits": min(room, 12)}
        layout = StagingLayout(room, bucket["num_rows"], bucket["num_logits"], 12 * MAX_BLOCKS)
        words, num_words = write_step(random, layout, tables, counts)
        mine = found.step(layout, words, num_words, **bucket)
        theirs = expected.step(layout, words, num_words, **bucket)
        for name, ours, other in zip(StepInputs._fields, mine, theirs, strict=True):
            assert torch.equal(ours, other), f"{name} of {counts}"
        assert torch.equal(found.staging, expected.staging), counts
        assert torch.equal(found.block_table, torch.from_numpy(tables)), counts
        assert torch.equal(expected.block_table, torch.from_numpy(tables)), counts

        # The twin, and so the kernel, against what the step says.
        live = sum(counts)
        ids = words[layout.token_ids : layout.token_ids + live].tolist()
        fed = [max(0, int(found.fed[-1 - each])) if each < 0 else each for each in ids]
        assert mine.token_ids.tolist() == fed + [0] * (room - live) + [-77] * 3
        assert mine.slot_mapping[live:].tolist() == [-1] * (room - live) + [-77] * 3
        starts = np.cumsum([0, *counts]).tolist()
        padded = starts + [live] * (bucket["num_rows"] - len(counts))
        assert mine.query_start.tolist() == padded + [-77] * 3
        assert (mine.context_len[len(counts) : -3] == 0).all()
        for row, context in enumerate(mine.context_len[: len(counts)].tolist()):
            slot = words[layout.row_slot + row]
            used = -(-context // BLOCK_SIZE)
            assert mine.block_table[row, :used].tolist() == tables[slot, :used].tolist()
            assert (mine.block_table[row, used:] == -77).all()
        num_logits = words[layout.header + 2]
        draws = found.staging[layout.draws :][: bucket["num_logits"] * DRAW_WORDS]
        assert (draws[: num_logits * DRAW_WORDS] > 0).all()
        assert (draws[num_logits * DRAW_WORDS :] == 0).all()
        num_steps += 1
    with pytest.raises(ValueError, match=r"^staging"):
        found.step(StagingLayout(16, 1, 1, 30_000), words, 8, num_tokens=16, num_rows=1, num_logits=1)
    print(num_steps)  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    tasks = (compare, invariance, refusals, bind)
    for name in sys.argv[1].split(","):
        next(task for task in tasks if task.__name__ == name)()
