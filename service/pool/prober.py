"""Finds out that a worker hangs. Knows GetWorkerInfo and this process's clock; does not know what follows."""

import asyncio
import contextlib

import grpc

from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc
from service.pool.channel import Metadata, probe

# At most: a quarter of the time after which a silent worker hangs.
PROBE_INTERVAL_S = 0.5


# Quoted type: in the stubs of grpc only.
async def hang(
    stub: "worker_pb2_grpc.WorkerServiceAsyncStub",
    metadata: Metadata,
    *,
    worker_timeout_s: float,
    step_timeout_s: float,
) -> str:
    """Ask a worker again and again how it is; return only when it hangs, and how that shows.

    Silence counts from the last answer, in intervals that this very process was awake for: after a pause of
    its own (it was stopped, the machine slept) answers have come that it has not read yet.

    Args:
        stub: Of the worker.
        metadata: Of every call to it.
        worker_timeout_s: A worker that answers nothing for so long hangs; up to one interval less or more.
        step_timeout_s: One whose step takes longer hangs too.
    """
    loop = asyncio.get_running_loop()
    interval_s = min(PROBE_INTERVAL_S, worker_timeout_s / 4)
    while True:
        answered_s, silence_s = loop.time(), interval_s
        await asyncio.sleep(interval_s)
        asking = asyncio.create_task(_ask(stub, metadata))
        try:
            while not asking.done():
                await asyncio.wait([asking], timeout=interval_s)
                silence_s += interval_s
                if silence_s >= worker_timeout_s and not asking.done():
                    return f"it did not answer for {loop.time() - answered_s:.1f} s"
        finally:
            asking.cancel()
        info = asking.result()
        if info is not None and info.running_step_ns > step_timeout_s * 1e9:
            return f"a step takes more than {step_timeout_s:g} s"


async def _ask(
    stub: "worker_pb2_grpc.WorkerServiceAsyncStub", metadata: Metadata
) -> worker_pb2.GetWorkerInfoResponse | None:
    """Return how the worker is, however long that takes; None for an error.

    An error comes from a worker that runs, or breaks the stream of its reports as well.
    """
    with contextlib.suppress(grpc.aio.AioRpcError):
        return await probe(stub, metadata, None)
    return None
