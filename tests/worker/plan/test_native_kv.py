"""Native programs over pools of every dtype: what they store, what they make of it, and blocks that move."""

import pytest
import torch

from tests.worker.numerics import bits
from tests.worker.plan.plan_cases import SHAPES, Shape, buffers_of, model_of, row_of
from worker.batch import Row
from worker.kernels.reference.store_kv import round_to_int8
from worker.kv.storage import KV_DTYPES, KvStorage
from worker.model.llama import LlamaModel
from worker.plan.executor import kernels_named
from worker.plan.graph import trace
from worker.plan.lower import lower
from worker.plan.passes import optimise
from worker.plan.program import Capacity

CAPACITY = Capacity(num_tokens=96, num_rows=4, max_blocks=8)
CLOSE = {"float16": 2e-3, "bfloat16": 2e-2, "int8": 4e-2}
"""Of the largest logit: some five times of what was seen over these models."""
PROMPT = 70
BLOCKS = (3, 5, 60, 2, 9)


class Arm:
    """The step of a model as a native program over a pool of its own, all bits of which are set."""

    def __init__(self, model: LlamaModel, dtype: str, shape: Shape, *, num_threads: int = 2) -> None:
        config = model.config
        self.kv = KvStorage(
            num_blocks=64,
            num_layers=config.num_layers,
            block_size=shape.block_size,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            dtype=KV_DTYPES[dtype],
        )
        self.kv.data.view(torch.uint8).fill_(0xFF)
        self._buffers = buffers_of(CAPACITY, block_size=shape.block_size)
        kernels = kernels_named("native", num_threads=num_threads)
        kernels.check(config, self.kv)
        program = lower(optimise(trace(model, self.kv)), CAPACITY)
        self._executor = kernels.executor(program, self._buffers.inputs, model.store, self.kv)

    def run(self, *rows: Row) -> torch.Tensor:
        bound = self._buffers.bind(rows)
        self._executor.arena.fill_(float("nan"))
        self._executor.run(bound.num_tokens, bound.num_rows, bound.num_logits)
        return self._executor.output[list(bound.places)].clone()


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


@pytest.fixture
def model(shape, tmp_path):
    return model_of(shape, tmp_path)


def stored(kv: KvStorage, shape: Shape, *, is_key: bool) -> torch.Tensor:
    """What layer 0 holds of the prompt, [PROMPT, num_kv_heads, head_size]."""
    cache = (kv.keys if is_key else kv.values)[0]
    return cache[list(BLOCKS)].flatten(0, 1)[:PROMPT]


@pytest.mark.parametrize("dtype", CLOSE)
def test_what_is_stored_is_what_was_computed_rounded_once(model, shape, dtype):
    exact, rounded = Arm(model, "float32", shape), Arm(model, dtype, shape)
    for arm in (exact, rounded):
        arm.run(row_of("a", PROMPT, 0, BLOCKS))
    for is_key in (True, False):
        # Nothing of layer 0's keys and values depends on the pool.
        computed = stored(exact.kv, shape, is_key=is_key)
        elements = stored(rounded.kv, shape, is_key=is_key)
        if dtype == "int8":
            expected, scales = round_to_int8(computed)
            scale_cache = rounded.kv.key_scales if is_key else rounded.kv.value_scales
            assert scale_cache is not None
            assert torch.equal(scale_cache[0][list(BLOCKS)].flatten(0, 1)[:PROMPT], scales)
        else:
            expected = computed.to(KV_DTYPES[dtype])
        assert torch.equal(elements, expected)


@pytest.mark.parametrize("dtype", CLOSE)
def test_logits_are_near_those_of_float32(model, shape, dtype):
    exact, rounded = Arm(model, "float32", shape), Arm(model, dtype, shape)
    for rows in (
        (row_of("a", PROMPT, 0, BLOCKS),),
        (row_of("a", 1, PROMPT, BLOCKS), row_of("b", 9, 0, (1,))),
    ):
        expected, logits = exact.run(*rows), rounded.run(*rows)
        assert not torch.equal(logits, expected)
        assert float((logits - expected).abs().max() / expected.abs().max()) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", CLOSE)
def test_chunks_threads_and_neighbours_change_no_bit(model, shape, dtype):
    whole = Arm(model, dtype, shape, num_threads=1)
    expected = whole.run(row_of("a", PROMPT, 0, BLOCKS))
    after = whole.run(row_of("a", 1, PROMPT, BLOCKS))
    for chunk, num_threads in ((1, 2), (16, 3), (33, 2)):
        arm = Arm(model, dtype, shape, num_threads=num_threads)
        for first in range(0, PROMPT, chunk):
            mine = row_of("a", min(chunk, PROMPT - first), first, BLOCKS)
            logits = arm.run(mine, row_of("b", 1, first % 16, (1,)))[:1]
        assert torch.equal(bits(logits), bits(expected))
        assert torch.equal(bits(arm.run(row_of("a", 1, PROMPT, BLOCKS))), bits(after))


@pytest.mark.parametrize("dtype", CLOSE)
def test_a_session_goes_on_with_restored_blocks_as_if_nothing_had_been(model, shape, dtype):
    arm = Arm(model, dtype, shape)
    arm.run(row_of("a", PROMPT, 0, BLOCKS))
    expected = arm.run(row_of("a", 1, PROMPT, BLOCKS))
    host = arm.kv.host_blocks(len(BLOCKS))
    arm.kv.evict(BLOCKS, host, range(len(BLOCKS)))
    arm.kv.data.view(torch.uint8).fill_(0x5A)
    elsewhere = (7, 33, 4, 5, 61)
    arm.kv.restore(host, range(len(BLOCKS)), elsewhere)
    assert torch.equal(bits(arm.run(row_of("a", 1, PROMPT, elsewhere))), bits(expected))
