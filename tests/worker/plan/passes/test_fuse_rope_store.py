import pytest

from tests.worker.plan.graphs import Maker, listing, make_example
from worker.plan.graph import StepGraph
from worker.plan.passes.fuse_rope_store import fuse_rope_store


def make_layer(
    *,
    k_position: str = "position",
    k_cos: str = "cos",
    k_sin: str = "sin",
    table_width: int = 8,
    computed_tables: bool = False,
    v_is_turned_k: bool = False,
    one_cache: bool = False,
    q_is_read: bool = False,
    k_is_read: bool = False,
    late_q: bool = False,
    second_reader: bool = False,
    attention_first: bool = False,
    other_values: bool = False,
    q_is_turned: bool = True,
) -> StepGraph:
    make = Maker()
    q, k, v, slots, table = (make.value(name) for name in ("q", "k", "v", "slots", "table"))
    positions = {name: make.value(name) for name in ("position", "shifted")}
    tables = {name: make.weight(name, 64, table_width) for name in ("cos", "sin", "other")}
    keys, values, others = (make.weight(name, 4, 16, 2, 16) for name in ("keys", "values", "others"))
    if one_cache:
        values = keys
    if computed_tables:
        tables["cos"] = make.call("add", tables["cos"], tables["sin"])
    cos, sin = tables["cos"], tables["sin"]

    def turn_q():
        return make.call("rope", q, positions["position"], cos, sin) if q_is_turned else q

    def attend(turned):
        read = others if other_values else values
        return make.call("paged_attention", turned, keys, read, table, table, table, 0.25)

    turned_q = None if late_q else turn_q()
    turned_k = make.call("rope", k, positions[k_position], tables[k_cos], tables[k_sin])
    results = []
    if attention_first:
        results.append(attend(turned_q))
    make.call("store_kv", turned_k, turned_k if v_is_turned_k else v, slots, keys, values)
    if turned_q is None:
        turned_q = turn_q()
    if not attention_first:
        results.append(attend(turned_q))
    if second_reader:
        results.append(attend(q))
    if q_is_read:
        results.append(turned_q)
    if k_is_read:
        results.append(turned_k)
    return make.done(*results)


def test_before_and_after():
    step = make_layer()
    assert listing(step) == [
        "rope(q, position, cos, sin)",
        "rope(k, position, cos, sin)",
        "store_kv(%1, v, slots, keys, values)",
        "paged_attention(%0, keys, values, table, table, table, 0.25)",
        "return(%3)",
    ]
    assert listing(fuse_rope_store(step)) == [
        "rope_store(q, k, v, position, slots, cos, sin, keys, values)",
        "paged_attention(%0, keys, values, table, table, table, 0.25)",
        "return(%1)",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"k_position": "shifted"},
        {"k_cos": "other"},
        {"k_sin": "other"},
        {"table_width": 4},
        {"computed_tables": True},
        {"v_is_turned_k": True},
        {"one_cache": True},
        {"q_is_read": True},
        {"k_is_read": True},
        {"late_q": True},
        {"second_reader": True},
        {"attention_first": True},
        {"other_values": True},
        {"q_is_turned": False},
    ],
    ids=str,
)
def test_another_pattern_stays(change):
    step = make_layer(**change)
    assert str(fuse_rope_store(step).graph) == str(step.graph)


@pytest.mark.parametrize("sizes", [{}, {"num_kv_heads": 4}, {"factors": True}, {"num_layers": 1}], ids=str)
def test_it_is_exact_over_a_whole_step(sizes):
    example = make_example(**sizes)
    fused = fuse_rope_store(example.step)
    assert example.equal(fused, example.step)
    names = [line.partition("(")[0] for line in listing(fused)]
    assert names.count("rope_store") == example.model.config.num_layers
    assert not {"rope", "store_kv"} & set(names)
