"""Pass: both rotations and the KV store of a layer become one launch."""

from torch import fx
from torch.fx.node import Argument

from worker.plan.graph import StepGraph
from worker.plan.passes.matching import GraphPass, calls, insert_call, is_call, is_constant, replace


@GraphPass
def fuse_rope_store(step: StepGraph) -> None:
    """Turns `rope(q), rope(k), store_kv(k, v)` into `rope_store(q, k, v)`, which returns the turned q.

    Exact: the same operations in one call. The q that belongs to a store is the one that the attention over
    the same caches reads; positions and tables must be those of k and of the caches' head size, and nothing
    else may read either of the turned values or touch the caches.
    """
    for store in calls(step.graph, "store_kv"):
        turned_k, v, slots, keys, values = store.args
        attention = _only_reader(store, keys, values)
        if attention is None or not store < attention or v is turned_k:
            continue
        turned_q = attention.args[0]
        if not isinstance(turned_q, fx.Node) or not isinstance(turned_k, fx.Node):
            continue
        if not _is_private_rope(turned_q) or not _is_private_rope(turned_k):
            continue
        q, *tables = turned_q.args
        k, *tables_of_k = turned_k.args
        if tables != tables_of_k or not turned_q < store or not _are_of_heads(step, tables[1:], keys):
            continue
        fused = insert_call(store, "rope_store", q, k, v, tables[0], slots, *tables[1:], keys, values)
        step.graph.erase_node(store)
        replace(turned_q, fused)
        step.graph.erase_node(turned_k)


def _only_reader(store: fx.Node, keys: Argument, values: Argument) -> fx.Node | None:
    """The attention that reads a layer's two caches, if beside `store` nothing else has to do with them."""
    if not isinstance(keys, fx.Node) or not isinstance(values, fx.Node) or keys is values:
        return None
    readers = (keys.users.keys() | values.users.keys()) - {store}
    if len(readers) != 1:
        return None
    (reader,) = readers
    return reader if is_call(reader, "paged_attention") and reader.args[1:3] == (keys, values) else None


def _is_private_rope(value: fx.Node) -> bool:
    return is_call(value, "rope") and len(value.users) == 1


def _are_of_heads(step: StepGraph, tables: list[Argument], keys: Argument) -> bool:
    """Whether cos and sin turn heads of the size that a cache has."""
    head_size = _width(step, keys)
    return head_size is not None and all(_width(step, table) == head_size // 2 for table in tables)


def _width(step: StepGraph, value: Argument) -> int | None:
    """Last dimension of a constant; None of any other value."""
    return step.shape(str(value.target))[-1] if isinstance(value, fx.Node) and is_constant(value) else None
