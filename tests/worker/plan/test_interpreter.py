"""The oracle against the model's step as it is written: the arena and the passes change no bit."""

import pytest
import torch

from tests.worker.numerics import bits
from tests.worker.plan.plan_cases import SHAPES, buffers_of, eager_logits, model_of, pool_of, row_of
from worker.batch import Row
from worker.kernels.ops import implementations
from worker.plan.graph import trace
from worker.plan.interpreter import Interpreter
from worker.plan.lower import lower
from worker.plan.passes import optimise
from worker.plan.program import Capacity

CAPACITY = Capacity(num_tokens=64, num_rows=4, max_blocks=8)
STEPS: list[list[Row]] = [
    [row_of("a", 20, 0, (3, 5))],
    [row_of("b", 7, 0, (1,), wants_logits=False), row_of("a", 1, 20, (3, 5))],
    [row_of("c", 33, 0, (60, 2, 9)), row_of("b", 9, 7, (1,)), row_of("a", 1, 21, (3, 5))],
    [row_of("b", 1, 16, (1, 8)), row_of("d", 1, 0, (0,), wants_logits=False)],
]


@pytest.mark.parametrize("graph", ["traced", "optimised"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_has_the_bits_of_the_plain_model(shape, graph, tmp_path):
    """The arena is NaN before each run, so that nothing is read before it was written."""
    sizes = SHAPES[shape]
    model = model_of(sizes, tmp_path)
    kv, plain_kv = (pool_of(model, block_size=sizes.block_size) for _ in range(2))
    step = trace(model, kv)
    program = lower(optimise(step) if graph == "optimised" else step, CAPACITY)
    buffers = buffers_of(CAPACITY, block_size=sizes.block_size)
    interpreter = Interpreter(program, implementations("reference"), buffers.inputs, model.store, kv)
    for rows in STEPS:
        bound = buffers.bind(rows)
        interpreter.arena.fill_(float("nan"))
        kernel_ns = interpreter.run(bound.num_tokens, bound.num_rows, bound.num_logits)
        expected = eager_logits(model, plain_kv, rows)
        assert torch.equal(bits(interpreter.output[list(bound.places)]), bits(expected))
        assert torch.equal(bits(kv.data), bits(plain_kv.data))
        assert kernel_ns > 0


def test_an_operator_without_implementation_is_refused(tiny_llama):
    kv = pool_of(tiny_llama)
    some = {name: call for name, call in implementations("reference").items() if name != "rope_store"}
    program = lower(optimise(trace(tiny_llama, kv)), CAPACITY)
    buffers = buffers_of(CAPACITY)
    with pytest.raises(ValueError, match="rope_store, which has no implementation"):
        Interpreter(program, some, buffers.inputs, tiny_llama.store, kv)
