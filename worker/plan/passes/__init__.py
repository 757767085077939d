"""The passes that turn a traced step into one of few, large launches. Each is a file of its own."""

from collections.abc import Callable

from worker.plan.graph import StepGraph
from worker.plan.passes.fuse_add_rms_norm import fuse_add_rms_norm
from worker.plan.passes.fuse_rope_store import fuse_rope_store
from worker.plan.passes.fuse_swiglu import fuse_swiglu
from worker.plan.passes.matching import GraphPass
from worker.plan.passes.merge_projections import merge_projections
from worker.plan.passes.remove_dead_code import remove_dead_code
from worker.plan.passes.select_logits_rows import select_logits_rows

PASSES: tuple[GraphPass, ...] = (
    select_logits_rows,
    merge_projections,
    fuse_rope_store,
    fuse_add_rms_norm,
    fuse_swiglu,
    remove_dead_code,
)
"""In order: gating is fused into merged projections only, and dead code is what the others leave."""


def optimise(step: StepGraph, on_pass: Callable[[str, StepGraph], None] | None = None) -> StepGraph:
    """Applies all passes, in order, to a copy of `step`.

    Args:
        step: As traced; stays as it is.
        on_pass: Told after each pass its name and the step as it is then, in a copy of its own.
    """
    step = step.copy()
    for graph_pass in PASSES:
        graph_pass.rewrite(step)
        if on_pass is not None:
            on_pass(graph_pass.name, step.copy())
    return step
