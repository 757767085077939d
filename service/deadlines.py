"""What is left of a caller's time. Knows gRPC's contexts only."""

from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

Context = grpc.aio.ServicerContext[Any, Any]
# A deadline beyond it is none: nothing here waits that long.
MAX_REMAINING_S = 7 * 24 * 3600.0


def remaining(context: Context) -> Duration | None:
    """Time until the caller's deadline; None where it has none."""
    remaining_s = context.time_remaining()
    if remaining_s is None or remaining_s > MAX_REMAINING_S:
        return None
    left = Duration()
    # At least 1 ns: 0 would read as absent on the wire's other side.
    left.FromNanoseconds(max(1, int(remaining_s * 1e9)))
    return left


def departure(context: Context) -> grpc.StatusCode:
    """How a call that was cut off ended for its client."""
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED
