"""Section: whole steps of Llama-3-8B's shapes, bfloat16."""

from bench.gpu_models import LLAMA3, TINY
from bench.gpu_steps import cases_of
from bench.gpu_values import Case, Setting


def cases(setting: Setting) -> list[Case]:
    """Decode over rows and contexts, and prefill."""
    return cases_of("Llama-3-8B", TINY if setting.is_tiny else LLAMA3, setting)
