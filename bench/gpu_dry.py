"""What a plan would be on a GPU, worked out without one: graph, passes and launch list over shapes alone."""

import torch

from bench.gpu_models import BLOCK_SIZE, matrix_shapes, random_llama, random_pool
from worker.batch import TokenClass
from worker.kernels.triton.configs import linear_config
from worker.kernels.triton.targets import TARGETS, Target
from worker.model.config import LlamaConfig
from worker.plan.graph import trace
from worker.plan.lower import lower
from worker.plan.passes import optimise
from worker.plan.program import Capacity


def plan_of(
    config: LlamaConfig,
    token_class: TokenClass,
    *,
    max_step_tokens: int,
    max_step_rows: int,
    target: Target = TARGETS["sm_90"],
) -> str:
    """Traces, optimises and lowers a step in bfloat16, and tells what came out.

    Args:
        config: Sizes of the model; nothing of its weights is made.
        token_class: Of the step.
        max_step_tokens: That a step may hold.
        max_step_rows: That a step may hold.
        target: Whose configs products take.
    """
    device, shapes = torch.device("meta"), matrix_shapes(config)

    def planes(parts: tuple[str, ...]) -> int:
        num_outputs, num_inputs = sum(shapes[name][0] for name in parts), shapes[parts[0]][1]
        return linear_config(
            target, token_class, num_outputs=num_outputs, num_inputs=num_inputs, kind="bfloat16"
        ).splits

    model = random_llama(config, dtype=torch.bfloat16, device=device)
    pool = random_pool(config, 1, dtype=torch.bfloat16, device=device)
    program = lower(
        optimise(trace(model, pool)),
        Capacity(max_step_tokens, max_step_rows, -(-config.max_context_tokens // BLOCK_SIZE)),
        narrow="bfloat16",
        q_narrow="bfloat16",
        planes=planes,
    )
    return f"{len(program.launches)} launches of the model, arena of {program.arena_bytes >> 20} MiB"
