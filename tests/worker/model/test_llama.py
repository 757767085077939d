import pytest
import torch

from tests.worker.plan.graphs import make_example, make_model
from worker.plan.graph import infer_shapes
from worker.plan.passes import optimise


def test_weights_are_by_file_name_without_the_rotation_tables():
    model = make_model(num_layers=1)
    assert "rope.cos" in model.store.tensors
    assert not [name for name in model.weights if name.startswith("rope")]
    assert model.weights["blk.0.attn_q.weight"] is model.store.tensors["blk.0.attn_q.weight"]


@pytest.mark.parametrize("tied", [True, False])
def test_there_is_always_a_head(tied):
    model = make_model(tied=tied)
    assert (model.weights["output.weight"] is model.weights["token_embd.weight"]) is tied


def test_factors_of_the_frequencies_go_into_the_tables_alone():
    plain, stretched = make_model(), make_model(factors=True)
    assert plain.store.tensors.keys() == stretched.store.tensors.keys()
    assert torch.equal(plain.store.tensors["rope.cos"][:, 0], stretched.store.tensors["rope.cos"][:, 0])
    assert not torch.equal(plain.store.tensors["rope.cos"], stretched.store.tensors["rope.cos"])


def test_instances_are_never_the_same():
    assert len({make_model(num_layers=1).instance_id for _ in range(3)}) == 3


def test_a_model_of_packed_weights_is_still_traced():
    """Plans are built again and again after the plain weights were let go."""
    example = make_example(tied=True)
    before = optimise(example.step)
    store = example.model.store
    for node in before.graph.find_nodes(op="get_attr"):
        parts = before.stacks.get(node.target, (node.target,))
        if not parts[0].startswith(("kv.", "rope.")) and before.tensors[parts[0]].dim() == 2:
            store.packed(parts)
    store.release_plain()
    assert store.tensors["token_embd.weight"].is_meta
    after = optimise(example.step)
    assert str(after.graph) == str(before.graph)
    assert after.stacks == before.stacks
    for step in (before, after):
        infer_shapes(step)
    shapes = [[node.meta.get("shape") for node in step.graph.nodes] for step in (before, after)]
    assert shapes[0] == shapes[1]
