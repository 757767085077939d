"""What is left of a caller's time. Knows gRPC's contexts and who may share a run, not what runs."""

from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

Context = grpc.aio.ServicerContext[Any, Any]
# A deadline beyond it is none: nothing here waits that long.
MAX_REMAINING_S = 7 * 24 * 3600.0


def run_deadline(request: Message, context: Context) -> Duration | None:
    """Time after which a worker may drop what `request` starts; None where it may not.

    What a request id starts others may wait for as well, each with a deadline of its own: it ends with
    the last of its callers, whom a deadline makes leave.
    """
    return None if request.HasField("request_id") else remaining(context)


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
