"""Pass: rows that no logits are wanted of are dropped before the head, not after."""

from torch import fx

from worker.plan.graph import StepGraph
from worker.plan.passes.matching import GraphPass, calls, insert_call, is_call, is_ready, replace

ROW_WISE = ("linear", "rms_norm")
"""Operators that compute each row from the same row of their first argument alone."""


@GraphPass
def select_logits_rows(step: StepGraph) -> None:
    """Moves `select_rows` up: `select(f(x), index)` becomes `f(select(x, index))` for row-wise f.

    Exact, because an operator gives a row the same bits in any company. It stops at a value that somebody
    else reads, and at operators of two values, where one selection would become two.
    """
    for select in calls(step.graph, "select_rows"):
        _move_up(select)


def _move_up(select: fx.Node) -> None:
    source, index = select.args
    if not isinstance(source, fx.Node) or not any(is_call(source, name) for name in ROW_WISE):
        return
    if not isinstance(index, fx.Node) or index.op != "placeholder" or not is_ready(index, source):
        return
    if len(source.users) > 1:
        return
    moved = insert_call(source, "select_rows", source.args[0], index)
    source.update_arg(0, moved)
    replace(select, source)
    _move_up(moved)
