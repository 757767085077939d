"""The way to one worker process: its channel, the token, and the wait until it answers.

Knows addresses and GetWorkerInfo; does not know sessions, generations or who started the worker.
"""

import asyncio
from collections.abc import Callable

import grpc

from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc
from service.errors import StartError

PROBE_TIMEOUT_S = 1.0
RETRY_S = 0.1
MAX_RETRY_S = 2.0
_EXIT_POLL_S = 0.05
# Metadata of every call to a worker that asks for a token.
TOKEN_KEY = "pagecast-token"  # noqa: S105  a name, no secret
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# The worker's server accepts a ping every 10 s (its `min_recv_ping_interval_without_data_ms`);
# pings below a server's interval end long streams.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
)

ExitCode = Callable[[], int | None]
Metadata = tuple[tuple[str, str], ...]


class WrongVersion(StartError):
    """The worker is of another version of Pagecast; both ends of its protocol have to be of one."""


def open_channel(address: str) -> grpc.aio.Channel:
    """Return a channel to the worker at `address`; it connects by itself."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


# Quoted types: in the stubs of grpc only.
async def probe(
    stub: "worker_pb2_grpc.WorkerServiceAsyncStub",
    metadata: Metadata,
    timeout_s: float | None = PROBE_TIMEOUT_S,
) -> worker_pb2.GetWorkerInfoResponse:
    """Ask a worker how it is. Raises grpc.aio.AioRpcError, also when `timeout_s` passes, if there is one."""
    return await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=timeout_s, metadata=metadata)


async def wait_until_serving(
    channel: grpc.aio.Channel, exit_code: ExitCode, timeout_s: float, metadata: Metadata
) -> worker_pb2.GetWorkerInfoResponse:
    """Ask a worker until it answers. Raises StartError: its process ended, or `timeout_s` passed."""
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    while True:
        code = exit_code()
        if code is not None:
            raise StartError(f"a worker ended with exit code {code} before it served; its log says why")
        try:
            return await probe(stub, metadata)
        except grpc.aio.AioRpcError as error:
            waited_s = loop.time() - started_s
            if waited_s > timeout_s:
                raise StartError(
                    f"a worker did not serve within {round(timeout_s, 2):g} s: {error.code().name}"
                ) from error
        # The longer it takes, the less a little more matters.
        retry_at_s = loop.time() + min(MAX_RETRY_S, max(RETRY_S, waited_s / 8))
        while exit_code() is None and loop.time() < retry_at_s:  # noqa: ASYNC110  an exit code, no event
            await asyncio.sleep(_EXIT_POLL_S)
