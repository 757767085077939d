"""The passes one after another, over steps of several kinds of models."""

import pytest

from tests.worker.plan.graphs import constants, listing, make_example, operators
from worker.plan.passes import PASSES, optimise
from worker.plan.passes.merge_projections import merge_projections

MODELS = {
    "grouped heads": {},
    "one layer": {"num_layers": 1},
    "own head": {"tied": False},
    "rope factors": {"factors": True},
    "as many KV heads": {"num_heads": 4, "num_kv_heads": 4},
    "odd sizes": {"head_size": 10, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 50},
}
FIRST = ["rms_norm"]
NEXT = ["add_rms_norm"]
REST = ["linear", "rope_store", "paged_attention", "linear", "add_rms_norm", "linear_swiglu", "linear"]
HEAD = ["add", "select_rows", "rms_norm", "linear"]


@pytest.fixture(params=MODELS)
def example(request):
    return make_example(**MODELS[request.param])


def test_a_layer_is_eight_launches():
    step = optimise(make_example(num_layers=3).step)
    layers = [*FIRST, *REST, *NEXT, *REST, *NEXT, *REST]
    assert operators(step) == ["embedding", *layers, *HEAD]
    assert len(layers) == 3 * 8


def test_one_layer_line_by_line():
    q, k, v = (f"blk.0.attn_{part}.weight" for part in "qkv")
    gate_up = "blk.0.ffn_gate.weight+blk.0.ffn_up.weight"
    assert listing(optimise(make_example(num_layers=1, tied=False).step)) == [
        "embedding(token_embd.weight, token_ids)",
        "rms_norm(%0, blk.0.attn_norm.weight, 1e-05)",
        f"linear(%1, {q}+{k}+{v})",
        "columns(%2, 0, 64)",
        "columns(%2, 64, 96)",
        "columns(%2, 96, 128)",
        "rope_store(%3, %4, %5, position, slot_mapping, rope.cos, rope.sin, kv.0.keys, kv.0.values)",
        "paged_attention(%6, kv.0.keys, kv.0.values, block_table, context_len, query_start, 0.25)",
        "linear(%7, blk.0.attn_output.weight)",
        "add_rms_norm(%0, %8, blk.0.ffn_norm.weight, 1e-05)",
        "part(%9, 0)",
        "part(%9, 1)",
        f"linear_swiglu(%11, {gate_up})",
        "linear(%12, blk.0.ffn_down.weight)",
        "add(%10, %13)",
        "select_rows(%14, logits_index)",
        "rms_norm(%15, output_norm.weight, 1e-05)",
        "linear(%16, output.weight)",
        "return(%17)",
    ]


def test_odd_sizes_keep_what_can_not_be_merged():
    step = optimise(make_example(**MODELS["odd sizes"]).step)
    rest = ["linear"] * 3 + ["rope_store", "paged_attention", "linear", "add_rms_norm", *["linear"] * 2]
    layer = [*rest, "swiglu", "linear"]
    assert operators(step) == ["embedding", *FIRST, *layer, *NEXT, *layer, *HEAD]
    assert step.stacks == {}


def test_only_merging_may_round_differently(example):
    """Every other pass is exact; where products are merged, plans that are compared are both merged."""
    step = example.step
    for graph_pass in PASSES:
        rewritten = graph_pass(step)
        rewritten.graph.lint()
        if graph_pass is merge_projections:
            example.close(rewritten, step)
        else:
            assert example.equal(rewritten, step), graph_pass.name
        step = rewritten
    assert listing(step) == listing(optimise(example.step))


def test_a_pass_leaves_its_argument_as_it_is(example):
    step = example.step
    for graph_pass in (*PASSES, optimise):
        graph, stacks, tensors = str(step.graph), dict(step.stacks), dict(step.tensors)
        rewritten = graph_pass(step)
        assert (str(step.graph), step.stacks) == (graph, stacks)
        assert step.tensors.keys() == tensors.keys()
        assert all(step.tensors[name] is tensors[name] for name in tensors)
        step = rewritten


def test_twice_is_once(example):
    step = example.step
    for graph_pass in PASSES:
        step = graph_pass(step)
        assert listing(graph_pass(step)) == listing(step), graph_pass.name
        assert graph_pass(step).stacks == step.stacks
    once = optimise(example.step)
    assert listing(optimise(once)) == listing(once)
    assert optimise(once).stacks == once.stacks


def test_a_tied_head_reads_the_embedding_after_all_passes():
    step = optimise(make_example(tied=True).step)
    assert "output.weight" not in constants(step)
    assert [line for line in listing(step) if "token_embd" in line] == [
        "embedding(token_embd.weight, token_ids)",
        f"linear(%{len(listing(step)) - 3}, token_embd.weight)",
    ]


def test_an_observer_sees_each_pass_and_can_not_disturb_it():
    seen = []

    def observe(name, step):
        seen.append((name, listing(step)))
        for node in reversed(step.graph.nodes):
            step.graph.erase_node(node)
        step.stacks.clear()

    example = make_example()
    assert listing(optimise(example.step, observe)) == listing(optimise(example.step))
    assert [name for name, _ in seen] == [graph_pass.name for graph_pass in PASSES]
    step = example.step
    for graph_pass, (_, lines) in zip(PASSES, seen, strict=True):
        step = graph_pass(step)
        assert listing(step) == lines
