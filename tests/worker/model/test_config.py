from dataclasses import replace

import pytest

from worker.model.config import LlamaConfig, ModelFileError

GOOD = LlamaConfig(
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    vocab_size=300,
    max_context_tokens=1024,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("hidden_size", -1),
        ("num_kv_heads", 3),
        ("num_kv_heads", 0),
        ("head_size", 15),
        ("max_context_tokens", 0),
        ("max_context_tokens", 2**20 + 1),
        ("max_context_tokens", 2**32 - 1),
        ("rope_theta", float("inf")),
        ("rope_theta", float("nan")),
        ("rms_norm_eps", 0.0),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ModelFileError, match=field):
        replace(GOOD, **{field: value})  # type: ignore[arg-type]
