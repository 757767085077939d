import pytest
import torch

from tests.worker.numerics import bits
from tests.worker.plan.graphs import Maker, constants, make_example, operators
from worker.plan.graph import (
    PROBE_LOGITS,
    PROBE_ROWS,
    PROBE_TOKENS,
    StepGraph,
    StepInputs,
    infer_shapes,
    operator_name,
)
from worker.plan.passes import optimise

LAYER = [
    "rms_norm",
    "linear",
    "rope",
    "linear",
    "rope",
    "linear",
    "store_kv",
    "paged_attention",
    "linear",
    "add",
    "rms_norm",
    "linear",
    "linear",
    "swiglu",
    "linear",
    "add",
]


def test_a_trace_is_the_step_as_the_model_writes_it():
    step = make_example(num_layers=2).step
    assert operators(step) == ["embedding", *LAYER, *LAYER, "rms_norm", "linear", "select_rows"]
    assert [node.target for node in step.graph.find_nodes(op="placeholder")] == list(StepInputs._fields)
    assert {"blk.1.ffn_down.weight", "rope.cos", "kv.0.keys", "kv.1.values"} <= constants(step)
    assert step.stacks == {}
    step.graph.lint()


def test_constants_stand_before_all_calls_once_each():
    kinds = [node.op for node in make_example().step.graph.nodes]
    assert kinds == sorted(kinds, key=["placeholder", "get_attr", "call_function", "output"].index)
    names = [node.target for node in make_example().step.graph.find_nodes(op="get_attr")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_reads_the_embedding(tied):
    assert ("output.weight" in constants(make_example(tied=tied).step)) is not tied


def test_a_trace_equals_the_model_run_directly():
    example = make_example()
    logits, pool = example.run(example.step)
    example.refill()
    assert not torch.equal(bits(example.kv.data), pool)
    direct = example.model.forward_paged_step(*example.inputs, kv=example.kv)
    assert torch.equal(bits(direct), logits)
    assert torch.equal(bits(example.kv.data), pool)


def shapes_of(step: StepGraph) -> dict[str, tuple[int, ...]]:
    infer_shapes(step)
    return {operator_name(node): node.meta.get("shape") for node in step.graph.nodes}


@pytest.mark.parametrize("optimised", [False, True])
def test_shapes_tell_tokens_from_logits(optimised):
    example = make_example(tied=False)
    step = optimise(example.step) if optimised else example.step
    shapes = shapes_of(step)
    assert shapes["embedding"] == (PROBE_TOKENS, 48)
    assert shapes["paged_attention"] == (PROBE_TOKENS, 64)
    assert shapes["linear"] == ((PROBE_LOGITS if optimised else PROBE_TOKENS), 72)
    assert shapes["select_rows"] == (PROBE_LOGITS, 48 if optimised else 72)
    (table,) = [node for node in step.graph.nodes if node.target == "block_table"]
    assert table.meta["shape"][0] == PROBE_ROWS
    for node in step.graph.nodes:
        if node.op == "output" or operator_name(node) == "store_kv":
            assert "shape" not in node.meta
        elif operator_name(node) == "add_rms_norm":
            assert node.meta["shapes"] == ((PROBE_TOKENS, 48), (PROBE_TOKENS, 48))
        else:
            assert node.meta["shape"], node


def test_shapes_of_merged_weights_and_their_columns():
    step = optimise(make_example().step)
    infer_shapes(step)
    by_name = {str(node.target): node for node in step.graph.nodes if node.op == "get_attr"}
    stack = "+".join(f"blk.0.attn_{part}.weight" for part in "qkv")
    assert by_name[stack].meta["shape"] == (128, 48) == step.shape(stack)
    (product,) = by_name[stack].users
    assert product.meta["shape"] == (PROBE_TOKENS, 128)
    assert [part.meta["shape"] for part in product.users] == [(PROBE_TOKENS, n) for n in (64, 32, 32)]
    gate_up = next(node for node in step.graph.nodes if operator_name(node) == "linear_swiglu")
    assert gate_up.meta["shape"] == (PROBE_TOKENS, 80)


def test_a_node_of_something_else_is_refused():
    make = Maker()
    x = make.value("token_ids")
    step = make.done(make.graph.call_function(len, (x,)))
    with pytest.raises(ValueError, match="is no part of a step"):
        infer_shapes(step)
    make = Maker()
    step = make.done(make.value("mystery"))
    with pytest.raises(ValueError, match="mystery"):
        infer_shapes(step)


def test_a_tensor_that_belongs_to_nobody_is_refused():
    example = make_example()
    strange = make_example()
    object.__setattr__(example.model, "forward_paged_step", strange.model.forward_paged_step)
    with pytest.raises(ValueError, match=r"shape \(72, 48\) .* neither the model's nor the pool's"):
        _ = example.step


def test_a_copy_is_another_graph_of_the_same_tensors():
    step = make_example().step
    copy = step.copy()
    assert str(copy.graph) == str(step.graph)
    assert copy.tensors is step.tensors
    for node in reversed(copy.graph.nodes):
        if operator_name(node) == "select_rows":
            node.replace_all_uses_with(node.args[0])
            copy.graph.erase_node(node)
    copy.stacks["a"] = ("b",)
    assert "select_rows" in operators(step)
    assert "select_rows" not in operators(copy)
    assert step.stacks == {}
