"""Native programs against each other and against the oracle, over tiny models of several shapes."""

from dataclasses import replace

import pagecast_native
import pytest
import torch

from tests.tiny_model import write_tiny_gguf
from tests.worker.numerics import bits
from tests.worker.plan.plan_cases import SHAPES, buffers_of, eager_logits, model_of, pool_of, row_of
from worker.batch import Batch, Row
from worker.config import WorkerConfig
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.model.weights.gguf import read_gguf
from worker.plan.executor import KernelsUnsuitable, kernels_named
from worker.plan.graph import StepGraph, trace
from worker.plan.lower import lower
from worker.plan.native import NativeKernels, native_unsuitable
from worker.plan.passes import PASSES, optimise
from worker.plan.passes.matching import ALIGNED_ROWS
from worker.plan.program import LANES, Capacity
from worker.runner import Runner

CAPACITY = Capacity(num_tokens=96, num_rows=4, max_blocks=8)
STEPS: list[list[Row]] = [
    [row_of("a", 20, 0, (3, 5))],
    [row_of("b", 7, 0, (1,), wants_logits=False), row_of("a", 1, 20, (3, 5))],
    [row_of("c", 33, 0, (60, 2, 9)), row_of("b", 9, 7, (1,)), row_of("a", 1, 21, (3, 5))],
    [row_of("b", 1, 16, (1, 8)), row_of("d", 1, 0, (0,), wants_logits=False)],
    [row_of("d", 1, 1, (0,), wants_logits=False)],
]
RELATIVE, ABSOLUTE = 1e-4, 1e-4
"""Float32 sums in another order, over two layers, on logits of up to 10."""


class Arm:
    """A graph as a native program over a pool of its own, its arena NaN before each step."""

    def __init__(self, model: LlamaModel, step: StepGraph, block_size: int, *, num_threads: int = 2) -> None:
        self.kv = pool_of(model, block_size=block_size)
        self._buffers = buffers_of(CAPACITY, block_size=block_size)
        kernels = kernels_named("native", num_threads=num_threads)
        self.program = lower(step, CAPACITY)
        self.executor = kernels.executor(self.program, self._buffers.inputs, model.store, self.kv)

    def run(self, rows: list[Row]) -> torch.Tensor:
        bound = self._buffers.bind(rows)
        self.executor.arena.fill_(float("nan"))
        self.kernel_ns = self.executor.run(bound.num_tokens, bound.num_rows, bound.num_logits)
        return self.executor.output[list(bound.places)]


@pytest.fixture(params=SHAPES)
def sizes(request):
    return SHAPES[request.param]


@pytest.fixture
def model(sizes, tmp_path) -> LlamaModel:
    return model_of(sizes, tmp_path)


def test_every_pass_leaves_every_bit(model, sizes):
    step = trace(model, pool_of(model, block_size=sizes.block_size))
    before = Arm(model, step, sizes.block_size)
    expected = [before.run(rows).clone() for rows in STEPS]
    for graph_pass in PASSES:
        step = graph_pass(step)
        after = Arm(model, step, sizes.block_size)
        for rows, logits in zip(STEPS, expected, strict=True):
            assert torch.equal(bits(after.run(rows)), bits(logits)), graph_pass.name
        assert torch.equal(bits(after.kv.data), bits(before.kv.data)), graph_pass.name


def test_each_pass_alone_leaves_every_bit(model, sizes):
    step = trace(model, pool_of(model, block_size=sizes.block_size))
    before = Arm(model, step, sizes.block_size)
    expected = [before.run(rows).clone() for rows in STEPS]
    for graph_pass in PASSES:
        alone = Arm(model, graph_pass(step), sizes.block_size)
        for rows, logits in zip(STEPS, expected, strict=True):
            assert torch.equal(bits(alone.run(rows)), bits(logits)), graph_pass.name


def test_logits_are_those_of_the_plain_model(model, sizes):
    arm = Arm(model, optimise(trace(model, pool_of(model, block_size=sizes.block_size))), sizes.block_size)
    plain_kv = pool_of(model, block_size=sizes.block_size)
    for rows in STEPS[:-1]:
        logits, expected = arm.run(rows), eager_logits(model, plain_kv, rows)
        torch.testing.assert_close(logits, expected, rtol=RELATIVE, atol=ABSOLUTE)
    torch.testing.assert_close(arm.kv.data, plain_kv.data, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)


def test_threads_change_no_bit(model, sizes):
    step = optimise(trace(model, pool_of(model, block_size=sizes.block_size)))
    arms = [Arm(model, step, sizes.block_size, num_threads=number) for number in (1, 2, 3)]
    for rows in STEPS:
        one, *others = (arm.run(rows) for arm in arms)
        assert all(torch.equal(bits(one), bits(other)) for other in others)


def test_a_launch_for_each_of_the_program_and_all_are_timed(model, sizes):
    arm = Arm(model, optimise(trace(model, pool_of(model, block_size=sizes.block_size))), sizes.block_size)
    arm.run(STEPS[0])
    assert len(arm.executor.launch_ns) == len(arm.program.launches)
    assert arm.kernel_ns > 0
    assert abs(sum(arm.executor.launch_ns) - arm.kernel_ns) <= len(arm.program.launches)


def test_a_step_beyond_the_capacity_is_refused(tiny_llama):
    arm = Arm(tiny_llama, optimise(trace(tiny_llama, pool_of(tiny_llama))), 16)
    with pytest.raises(ValueError, match="tokens"):
        arm.executor.run(97, 1, 1)


def test_packed_weights_are_made_once_and_serve_without_plain_ones(tmp_path):
    model = model_of(SHAPES["grouped"], tmp_path)
    rows = [row_of("a", 20)]
    runners = [
        Runner(model, pool_of(model), kernels="native", max_step_tokens=32, max_step_rows=2) for _ in range(2)
    ]
    runners[0].warm_up()
    packed = model.store.packed_bytes
    runners[1].warm_up()
    assert model.store.packed_bytes == packed > 0
    logits = eager_logits(model, pool_of(model), rows)
    runners[0].release_plain_weights()
    assert model.store.tensors["blk.0.attn_q.weight"].is_meta
    fresh = Runner(model, pool_of(model), kernels="native", max_step_tokens=32, max_step_rows=2)
    for runner in (*runners, fresh):
        torch.testing.assert_close(
            runner.run(Batch(tuple(rows))).logits, logits, rtol=RELATIVE, atol=ABSOLUTE
        )
    plain = Runner(model, pool_of(model), kernels="reference", max_step_tokens=32, max_step_rows=2)
    with pytest.raises(RuntimeError, match="plain copy was released"):
        plain.run(Batch(tuple(rows)))


@pytest.mark.parametrize(
    ("changes", "block_size", "message"),
    [
        ({"head_size": 24}, 16, "head_size=24"),
        ({"head_size": 272}, 16, "head_size=272 is over 256"),
        ({}, 8, "block_size=8"),
        ({}, 24, "block_size=24"),
    ],
)
def test_sizes_that_do_not_suit_are_told(tmp_path, changes, block_size, message):
    model = model_of(replace(SHAPES["grouped"], **changes), tmp_path)
    assert message in native_unsuitable(model.config, block_size)
    with pytest.raises(KernelsUnsuitable, match=message):
        Runner(
            model,
            pool_of(model, block_size=block_size),
            kernels="native",
            max_step_tokens=8,
            max_step_rows=1,
        )


def test_an_operator_without_a_native_kernel_is_told(tiny_llama):
    step = trace(tiny_llama, pool_of(tiny_llama))
    program = lower(step, CAPACITY)
    (first, *others) = program.launches
    strange = replace(program, launches=(replace(first, operator="scale_by"), *others))
    kernels = kernels_named("native")
    inputs = buffers_of(CAPACITY).inputs
    with pytest.raises(KernelsUnsuitable, match="no operator scale_by"):
        kernels.executor(strange, inputs, tiny_llama.store, pool_of(tiny_llama))


def test_flags_take_as_many_threads_as_a_team_has():
    most = pagecast_native.MAX_THREADS
    config = WorkerConfig.load(["--listen", "x", "--threads", str(most)])
    kernels_named("native", num_threads=config.num_threads)
    with pytest.raises(ValueError, match=f"{most + 1}, must be 1 to {most}"):
        kernels_named("native", num_threads=most + 1)


def test_sizes_that_suit_are_fine(model, sizes):
    assert native_unsuitable(model.config, sizes.block_size) is None


@pytest.mark.parametrize("eps", [1e-50, 1e50])
def test_an_eps_that_float32_does_not_hold_is_told(tiny_llama, eps):
    assert f"rms_norm_eps={eps}" in native_unsuitable(replace(tiny_llama.config, rms_norm_eps=eps), 16)


def test_a_pool_that_no_kv_layer_describes_is_told(tiny_llama):
    wide = replace(tiny_llama.config, num_heads=1 << 16, num_kv_heads=1 << 16)
    assert "num_kv_heads=65536 is over 65535" in native_unsuitable(wide, 16)
    deep = replace(tiny_llama.config, num_heads=1 << 15, num_kv_heads=1 << 15, num_layers=128)
    assert "num_layers=128: a KV block has 2147483648 floats" in native_unsuitable(deep, 16)
    assert native_unsuitable(replace(deep, num_layers=127), 16) is None


UNUSUAL = {
    "the largest head": {"num_heads": 2, "num_kv_heads": 1, "head_size": 256},
    "nothing but tails": {"hidden_size": 3, "intermediate_size": 7, "padded_vocab": 1},
    "width 1": {"hidden_size": 1, "intermediate_size": 1, "max_context_tokens": 1},
    "halves of 24": {"intermediate_size": 24, "padded_vocab": 5},
    "many heads to one": {"num_heads": 21, "num_kv_heads": 3, "max_context_tokens": 17},
}


@pytest.mark.parametrize("changes", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_sizes_run(tmp_path, changes):
    model = LlamaModel.from_gguf(read_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", **changes)))
    count = min(20, model.config.max_context_tokens)
    rows = [row_of("a", count, 0, (3, 5)[: -(-count // 16)])]
    runner = Runner(model, pool_of(model), kernels="native", max_step_tokens=32, max_step_rows=2)
    logits = runner.run(Batch(tuple(rows))).logits
    torch.testing.assert_close(
        logits, eager_logits(model, pool_of(model), rows), rtol=1e-3, atol=1e-3 * float(logits.abs().max())
    )


def test_programs_are_laid_out_in_the_kernels_lanes():
    assert LANES == ALIGNED_ROWS == pagecast_native.LANES


def test_the_name_tells_set_threads_and_activations():
    for kernel_set in pagecast_native.kernel_sets():
        for num_threads in (1, 3):
            kernels = NativeKernels(num_threads=num_threads, kernel_set=kernel_set)
            assert kernels.name == f"native/{kernel_set}/{num_threads}/float32"
    best = pagecast_native.default_kernel_set()
    rounding = kernels_named("native", num_threads=2, activations="int8")
    assert rounding.name == f"native/{best}/2/int8"


def test_activations_that_kernels_do_not_have_are_refused():
    with pytest.raises(ValueError, match="activations='int4' is none of float32, int8, bfloat16"):
        kernels_named("native", activations="int4")
    with pytest.raises(ValueError, match="activations='int8': reference kernels have float32 only"):
        kernels_named("reference", activations="int8")


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ({"dtype": torch.float8_e4m3fn}, "the pool is torch.float8_e4m3fn"),
        ({"keys_across": False}, "keys along their block"),
    ],
)
def test_a_pool_that_is_none_of_theirs_is_refused(tmp_path, layout, told):
    model = model_of(SHAPES["grouped"], tmp_path)
    config = model.config
    sizes = {name: getattr(config, name) for name in ("num_layers", "num_kv_heads", "head_size")}
    kv = KvStorage(num_blocks=4, block_size=16, **sizes, **layout)
    with pytest.raises(KernelsUnsuitable, match=told):
        kernels_named("native").check(config, kv)
