"""Section: whole steps of TinyLlama-1.1B's shapes, bfloat16."""

from bench.gpu_models import TINY, TINYLLAMA
from bench.gpu_steps import cases_of
from bench.gpu_values import Case, Setting


def cases(setting: Setting) -> list[Case]:
    """Decode over rows and contexts, and prefill."""
    return cases_of("TinyLlama-1.1B", TINY if setting.is_tiny else TINYLLAMA, setting)
