"""Rules on how tokens are drawn and when a turn stops. Knows no vocabulary: ids are the worker's to check."""

from pagecast.v1 import generation_pb2, session_pb2
from service.validate.fields import check_count, check_optional, check_range, out_of_range
from service.validate.limits import (
    AT_LEAST_ONE,
    LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_STOP_SEQUENCE_BYTES,
    MAX_STOP_SEQUENCES,
    MAX_STOP_TOKEN_IDS,
    SAMPLING,
)


def check_sampling(sampling: session_pb2.SamplingParams, path: str) -> None:
    """Refuse a value outside its range; `path` is where the message is in its request."""
    for name, allowed in SAMPLING.items():
        check_optional(sampling, name, allowed, f"{path}.{name}")
    check_count(len(sampling.logit_bias), MAX_LOGIT_BIASES, f"{path}.logit_bias")
    for bias in sampling.logit_bias.values():
        check_range(bias, LOGIT_BIAS, f"{path}.logit_bias")


def check_stopping(stopping: generation_pb2.StoppingCriteria) -> None:
    """Refuse criteria that are out of range, or that no turn can meet."""
    check_optional(stopping, "max_tokens", AT_LEAST_ONE, "stopping.max_tokens")
    if stopping.HasField("max_tokens") and stopping.min_tokens > stopping.max_tokens:
        raise out_of_range(
            "stopping.min_tokens",
            f"is over stopping.max_tokens of {stopping.max_tokens}",
            value=str(stopping.min_tokens),
            max=str(stopping.max_tokens),
        )
    check_count(len(stopping.stop_sequences), MAX_STOP_SEQUENCES, "stopping.stop_sequences")
    for index, sequence in enumerate(stopping.stop_sequences):
        size_bytes = len(sequence.encode())
        if not 1 <= size_bytes <= MAX_STOP_SEQUENCE_BYTES:
            raise out_of_range(
                f"stopping.stop_sequences[{index}]",
                f"has {size_bytes} bytes, of 1 to {MAX_STOP_SEQUENCE_BYTES} that are taken",
                bytes=str(size_bytes),
                max=str(MAX_STOP_SEQUENCE_BYTES),
            )
    check_count(len(stopping.stop_token_ids), MAX_STOP_TOKEN_IDS, "stopping.stop_token_ids")
