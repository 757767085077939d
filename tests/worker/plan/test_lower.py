import operator

import pytest
import torch
from torch import fx

from tests.worker.plan.plan_cases import SHAPES, model_of, pool_of
from worker.kernels import ops
from worker.plan.graph import StepGraph, trace
from worker.plan.lower import lower
from worker.plan.passes import optimise
from worker.plan.program import Capacity, Constant, Extent, Input, KvLayer, Program, Value

CAPACITY = Capacity(num_tokens=40, num_rows=8, max_blocks=4)


@pytest.fixture(params=SHAPES)
def model(request, tmp_path):
    return model_of(SHAPES[request.param], tmp_path)


@pytest.fixture(params=["traced", "optimised"])
def program(request, model) -> Program:
    step = trace(model, pool_of(model))
    return lower(optimise(step) if request.param == "optimised" else step, CAPACITY)


def span(value: Value) -> tuple[int, int]:
    """First float of its first row to the end of its last, at capacity."""
    count = CAPACITY.of(value.extent)
    return value.offset, value.offset + (count - 1) * value.row_stride + value.width


def test_eight_launches_a_layer(tiny_llama):
    program = lower(optimise(trace(tiny_llama, pool_of(tiny_llama))), CAPACITY)
    layer = [
        "linear",
        "rope_store",
        "paged_attention",
        "linear",
        "add_rms_norm",
        "linear_swiglu",
        "linear",
    ]
    between = ["add_rms_norm"]
    names = [launch.operator for launch in program.launches]
    assert names[:2] == ["embedding", "rms_norm"]
    assert names[2 : 2 + 15] == layer + between + layer
    assert sorted(names[17:]) == ["add", "linear", "rms_norm", "select_rows"]
    assert program.output.extent is Extent.LOGITS
    assert program.output.width == tiny_llama.config.vocab_size


def test_outputs_never_lie_over_the_inputs_of_their_launch(program):
    for launch in program.launches:
        for output in launch.outputs:
            start, end = span(output)
            for read in (value for value in launch.arguments if isinstance(value, Value)):
                read_start, read_end = span(read)
                assert end <= read_start or read_end <= start, launch


def test_what_is_read_was_written_by_nobody_else_since(program):
    """Every float of the arena is marked with the launch output that wrote it; reads must find one mark."""
    marks = torch.full((program.arena_bytes // 4,), -1)
    number = 0

    def rows(value: Value) -> torch.Tensor:
        count = CAPACITY.of(value.extent)
        return marks.as_strided((count, value.width), (value.row_stride, 1), value.offset)

    for launch in program.launches:
        for read in (value for value in launch.arguments if isinstance(value, Value)):
            found = rows(read).unique().tolist()
            assert len(found) == 1
            assert found != [-1]
        for output in launch.outputs:
            rows(output).fill_(number)
            number += 1
    assert rows(program.output).unique().tolist() == [number - 1]


def test_rows_are_whole_cache_lines_and_the_arena_is_small(program):
    values = [value for launch in program.launches for value in launch.outputs]
    for value in values:
        assert value.row_stride == -(-value.width // 16) * 16
        assert value.offset % 16 == 0
        assert 4 * span(value)[1] <= program.arena_bytes
    assert program.unshared_bytes == sum(4 * CAPACITY.of(v.extent) * v.row_stride for v in values)
    assert program.arena_bytes < program.unshared_bytes / 3


def test_columns_are_views_of_what_they_are_cut_from(tiny_llama):
    program = lower(optimise(trace(tiny_llama, pool_of(tiny_llama))), CAPACITY)
    config = tiny_llama.config
    assert "columns" not in {launch.operator for launch in program.launches}
    for merged, store in zip(program.launches, program.launches[1:], strict=False):
        if store.operator != "rope_store":
            continue
        whole = merged.outputs[0]
        q, k, v = store.arguments[:3]
        assert [value.offset - whole.offset for value in (q, k, v)] == [0, q.width, q.width + k.width]
        assert {value.row_stride for value in (q, k, v)} == {whole.row_stride}
        assert (q.width, k.width) == (
            config.num_heads * config.head_size,
            config.num_kv_heads * config.head_size,
        )
        assert merged.arguments[1].parts[0].endswith("attn_q.weight")
        assert store.arguments[3:5] == (Input("position"), Input("slot_mapping"))
        assert store.arguments[5] == Constant(("rope.cos",))
        assert store.arguments[7].is_key
        assert store.arguments[8] == KvLayer(store.arguments[7].layer, is_key=False)


def test_lowering_is_the_same_every_time(model):
    kv = pool_of(model)
    assert lower(optimise(trace(model, kv)), CAPACITY) == lower(optimise(trace(model, kv)), CAPACITY)


def graph_of(build) -> StepGraph:
    """A graph over `x` (the embedding of all tokens) that `build` ends."""
    graph = fx.Graph()
    token_ids, index = graph.placeholder("token_ids"), graph.placeholder("logits_index")
    weight = graph.get_attr("w")
    x = graph.call_function(ops.overload("embedding"), (weight, token_ids))
    graph.output(build(graph, x, index, weight))
    return StepGraph(graph, {"w": torch.zeros(20, 48)}, {})


def test_columns_of_columns_and_of_the_output():
    def build(graph, x, index, weight):
        part = graph.call_function(ops.overload("columns"), (x, 16, 48))
        inner = graph.call_function(ops.overload("columns"), (part, 4, 20))
        total = graph.call_function(ops.overload("add"), (inner, inner))
        rows = graph.call_function(ops.overload("select_rows"), (total, index))
        return graph.call_function(ops.overload("columns"), (rows, 2, 5))

    program = lower(graph_of(build), CAPACITY)
    embedding, add, select = program.launches
    assert add.arguments[0].offset == embedding.outputs[0].offset + 20
    assert (add.arguments[0].width, add.arguments[0].row_stride) == (16, 48)
    assert (program.output.offset, program.output.width) == (select.outputs[0].offset + 2, 3)
    # Read by the last launch, the first result does not make room for the second.
    assert program.arena_bytes == 4 * (40 * 48 + 40 * 16)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda graph, x, index, weight: x, "no row for each token that logits are wanted for"),
        (lambda graph, x, index, weight: weight, "not computed by a launch"),
        (
            lambda graph, x, index, weight: graph.call_function(ops.overload("rms_norm"), (x, weight, "1")),
            "argument '1' is neither",
        ),
        (lambda graph, x, index, weight: graph.call_function(torch.relu, (x,)), "relu"),
        (lambda graph, x, index, weight: graph.call_method("abs", (x,)), "abs"),
        (
            lambda graph, x, index, weight: graph.call_function(ops.overload("columns"), (x, 40, 49)),
            "columns 40:49 of 48",
        ),
    ],
)
def test_a_graph_that_is_no_step_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        lower(graph_of(build), CAPACITY)


def test_both_results_of_a_launch_are_named():
    def build(graph, x, index, weight):
        both = graph.call_function(ops.overload("add_rms_norm"), (x, x, weight, 1e-5))
        total = graph.call_function(operator.getitem, (both, 0))
        normed = graph.call_function(operator.getitem, (both, 1))
        last = graph.call_function(ops.overload("add"), (normed, total))
        return graph.call_function(ops.overload("select_rows"), (last, index))

    add_rms_norm, add = lower(graph_of(build), CAPACITY).launches[1:3]
    sums, normed = add_rms_norm.outputs
    assert [value.offset for value in add.arguments] == [normed.offset, sums.offset]


def device_program(model, planes=4) -> Program:
    asked: list[tuple[str, ...]] = []

    def planes_of(parts: tuple[str, ...]) -> int:
        asked.append(parts)
        return planes

    step = optimise(trace(model, pool_of(model)))
    program = lower(step, CAPACITY, narrow="bfloat16", q_narrow="float16", planes=planes_of)
    assert ("output.weight",) not in asked
    assert ("token_embd.weight",) not in asked
    return program


def test_only_values_that_all_readers_round_are_narrow(tiny_llama):
    program = device_program(tiny_llama)
    dtypes = {
        (launch.operator, number): value.dtype
        for launch in program.launches
        for number, value in enumerate(launch.outputs)
    }
    assert dtypes == {
        ("embedding", 0): "float32",
        ("rms_norm", 0): "bfloat16",
        ("linear", 0): "float32",
        ("rope_store", 0): "float16",
        ("paged_attention", 0): "bfloat16",
        ("add_rms_norm", 0): "float32",
        ("add_rms_norm", 1): "bfloat16",
        ("linear_swiglu", 0): "bfloat16",
        ("add", 0): "float32",
        ("select_rows", 0): "float32",
    }
    for launch in program.launches:
        for value in launch.outputs:
            item_bytes = 4 if value.dtype == "float32" else 2
            assert value.row_stride == -(-value.width * item_bytes // 64) * 16


def test_products_are_planes_where_every_reader_adds_them(tiny_llama):
    program = device_program(tiny_llama)
    products = [launch for launch in program.launches if launch.operator == "linear"]
    planes = [launch.outputs[0].planes for launch in products]
    assert planes == [4, 4, 4] * 2 + [1]  # q, k and v; attention's; the MLP's; the head
    for launch in products[:-1]:
        value = launch.outputs[0]
        assert value.plane_stride == CAPACITY.num_tokens * value.row_stride
    store = next(launch for launch in program.launches if launch.operator == "rope_store")
    whole = products[0].outputs[0]
    for part in store.arguments[:3]:
        assert (part.planes, part.plane_stride) == (whole.planes, whole.plane_stride)
    plain = device_program(tiny_llama, planes=1)
    assert {value.plane_stride for launch in plain.launches for value in launch.outputs} == {0}
    assert plain.arena_bytes < program.arena_bytes


@pytest.mark.parametrize("planes", [1, 3])
def test_all_planes_are_kept_until_they_are_read(model, planes):
    """As above: marks, here of every plane, and of narrow rows as much as they take."""
    program = device_program(model, planes=planes)
    marks = torch.full((program.arena_bytes // 4,), -1)
    number = 0

    def rows(value: Value) -> torch.Tensor:
        count = CAPACITY.of(value.extent)
        floats = value.width if value.dtype == "float32" else -(-value.width // 2)
        shape = (value.planes, count, floats)
        return marks.as_strided(shape, (value.plane_stride, value.row_stride, 1), value.offset)

    for launch in program.launches:
        for read in (value for value in launch.arguments if isinstance(value, Value)):
            found = rows(read).unique().tolist()
            assert len(found) == 1
            assert found != [-1]
        for output in launch.outputs:
            rows(output).fill_(number)
            number += 1
    assert rows(program.output).unique().tolist() == [number - 1]


def test_columns_of_a_norm_stay_float32_and_a_residual_is_one_plane():
    def build(graph, x, index, weight):
        normed = graph.call_function(ops.overload("rms_norm"), (x, weight, 1e-5))
        part = graph.call_function(ops.overload("columns"), (normed, 0, 48))
        product = graph.call_function(ops.overload("linear"), (part, weight))
        other = graph.call_function(ops.overload("linear"), (part, weight))
        total = graph.call_function(ops.overload("add"), (product, other))
        return graph.call_function(ops.overload("select_rows"), (total, index))

    program = lower(graph_of(build), CAPACITY, narrow="float16", planes=lambda _: 2)
    _, norm, product, other, *_ = program.launches
    assert norm.outputs[0].dtype == "float32"
    assert (product.outputs[0].planes, other.outputs[0].planes) == (1, 2)


@pytest.mark.parametrize("name", ["narrow", "q_narrow"])
def test_an_unknown_dtype_is_refused(tiny_llama, name):
    step = optimise(trace(tiny_llama, pool_of(tiny_llama)))
    with pytest.raises(ValueError, match=f"{name}='float8' is none of"):
        lower(step, CAPACITY, **{name: "float8"})
