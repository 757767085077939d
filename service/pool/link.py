"""One worker as the gateway sees it: calls, step reports, and whether it is still there.

Knows the worker protocol; does not know sessions, clients or how the worker was started.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from structlog.typing import FilteringBoundLogger

from pagecast.v1 import model_pb2
from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc
from service.errors import PagecastError, Reason, StartError, from_refusal
from service.pool.mailbox import Mailbox

CALL_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 1.0
# How long a worker whose reports stopped may take to answer before it counts as lost.
RECONNECT_S = 3.0
RETRY_S = 0.1
CLOSE_TIMEOUT_S = 2.0
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# The worker's server accepts a ping every 10 s (its `min_recv_ping_interval_without_data_ms`);
# pings below a server's interval end long streams.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
)
_GONE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

Request = TypeVar("Request")
Response = TypeVar(
    "Response",
    worker_pb2.OpenSessionResponse,
    worker_pb2.GetSessionResponse,
    worker_pb2.UpdateSessionResponse,
    worker_pb2.CloseSessionResponse,
    worker_pb2.SubmitResponse,
    worker_pb2.CancelResponse,
)
Result = TypeVar("Result")
ExitCode = Callable[[], int | None]


class WorkerLink:
    """A channel to one worker and the task that reads its step reports.

    Make one with `connect`. Losing the worker is final: every followed generation fails with
    WORKER_LOST, and so does every later call.

    Attributes:
        stub: For `call`.
        model: What the worker serves.
        lost: Set once the worker is lost or the link is closed.
    """

    def __init__(
        self, channel: grpc.aio.Channel, info: worker_pb2.GetWorkerInfoResponse, exit_code: ExitCode,
        log: FilteringBoundLogger,
    ) -> None:  # fmt: skip
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self.model: model_pb2.Model = info.model
        self.lost = asyncio.Event()
        self._channel = channel
        self._instance_id = info.instance_id
        self._exit_code = exit_code
        self._log = log.bind(worker=info.instance_id)
        self._mailboxes: dict[str, Mailbox] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._last_report = 0
        self._reader = asyncio.create_task(self._read(), name="step-reader")

    @classmethod
    async def connect(
        cls, address: str, *, version: str, exit_code: ExitCode, timeout_s: float, log: FilteringBoundLogger
    ) -> "WorkerLink":
        """Wait until the worker at `address` serves, and follow its step reports.

        Raises:
            StartError: Its process ended, `timeout_s` passed, or it is of another version.
        """
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        try:
            info = await _wait_until_serving(channel, exit_code, timeout_s)
            if info.version != version:
                raise StartError(f"the worker is of version {info.version!r}, this gateway of {version!r}")
        except BaseException:
            await channel.close()
            raise
        return cls(channel, info, exit_code, log)

    async def call(
        self, method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]", request: Request
    ) -> Response:
        """Call the worker.

        Raises:
            PagecastError: What the worker refused with, or WORKER_LOST when it does not answer.
            grpc.aio.AioRpcError: A bug in the worker.
        """
        if self.lost.is_set():
            raise _worker_lost()
        try:
            response = await method(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in _GONE:
                raise _worker_lost() from error
            raise
        if response.HasField("refusal"):
            raise from_refusal(response.refusal)
        return response

    async def settle(
        self, call: Coroutine[Any, Any, Result], undo: Callable[[], Awaitable[object]]
    ) -> Result:
        """Await `call`, and `undo` it in the background if its answer is never known to the caller.

        That is so when the caller is cancelled meanwhile (the call still runs to its end first), and
        when the worker did not answer in time: it may have done what was asked.
        """
        task = self.spawn(call)
        try:
            return await asyncio.shield(task)
        except (asyncio.CancelledError, PagecastError):
            self.spawn(self._undo(task, undo))
            raise

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `work` as a task that `close` waits for."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def attempt(self, work: Awaitable[object]) -> None:
        """Await `work` whose failure changes nothing for anybody: a refusal, or a worker that is lost."""
        try:
            await work
        except PagecastError as error:
            self._log.debug("background_call_failed", reason=str(error.reason))
        except grpc.aio.AioRpcError as error:
            self._log.error("background_call_failed", exc_info=error)

    @contextmanager
    def follow(self, generation_id: str) -> Iterator[Mailbox]:
        """Collect the generation's events; enter before it is submitted, they may come before the reply."""
        mailbox = Mailbox()
        if self.lost.is_set():
            mailbox.fail(_worker_lost())
        self._mailboxes[generation_id] = mailbox
        try:
            yield mailbox
        finally:
            del self._mailboxes[generation_id]

    async def close(self) -> None:
        """Let background work end for at most `CLOSE_TIMEOUT_S`, then cut the channel."""
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_TIMEOUT_S)
        leftover = [self._reader, *self._background]
        for task in leftover:
            task.cancel()
        await asyncio.gather(*leftover, return_exceptions=True)
        self._lose()  # a reader that is cancelled before it ran has not said so
        await self._channel.close()

    async def _undo(self, task: asyncio.Task[Any], undo: Callable[[], Awaitable[object]]) -> None:
        await asyncio.wait([task])
        error = None if task.cancelled() else task.exception()
        is_refused = isinstance(error, PagecastError) and error.reason is not Reason.WORKER_LOST
        if not is_refused:
            await self.attempt(undo())

    async def _read(self) -> None:
        """Read reports, coming back after the last one for as long as the worker is there."""
        try:
            while True:
                await self._read_stream()
                if not await self._is_there():
                    break
        except Exception as error:  # noqa: BLE001  streams must fail, not hang, whatever happens here
            self._log.error("step_reader_failed", exc_info=error)
        finally:
            self._lose()

    async def _read_stream(self) -> None:
        """Hand out reports until the stream breaks."""
        try:
            async for message in self.stub.StreamSteps(
                worker_pb2.StreamStepsRequest(after_report=self._last_report)
            ):
                self._hand_out(message)
        except grpc.aio.AioRpcError as error:
            self._log.debug("step_stream_broken", code=error.code().name)
            if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                if self._last_report == 0:
                    raise
                # The next report is no longer kept: what it told cannot be known any more.
                self._fail_all()
                self._last_report = 0

    def _hand_out(self, message: worker_pb2.StreamStepsResponse) -> None:
        self._last_report = message.report
        for event in message.events:
            mailbox = self._mailboxes.get(event.generation_id)
            if mailbox is not None:
                mailbox.put(event)

    async def _is_there(self) -> bool:
        """Whether the same worker process answers within `RECONNECT_S`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + RECONNECT_S
        while loop.time() < deadline_s:
            await asyncio.sleep(RETRY_S)
            if self._exit_code() is not None:
                break
            try:
                info = await _probe(self.stub)
            except grpc.aio.AioRpcError:
                continue
            return info.instance_id == self._instance_id
        self._log.error("worker_lost", exit_code=self._exit_code())
        return False

    def _lose(self) -> None:
        self.lost.set()
        self._fail_all()

    def _fail_all(self) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(_worker_lost())


def _worker_lost() -> PagecastError:
    return PagecastError(Reason.WORKER_LOST, "the worker that holds this session is lost")


# Quoted types: in the stubs of grpc only.
async def _probe(stub: "worker_pb2_grpc.WorkerServiceAsyncStub") -> worker_pb2.GetWorkerInfoResponse:
    return await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=PROBE_TIMEOUT_S)


async def _wait_until_serving(
    channel: grpc.aio.Channel, exit_code: ExitCode, timeout_s: float
) -> worker_pb2.GetWorkerInfoResponse:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        code = exit_code()
        if code is not None:
            raise StartError(f"a worker ended with exit code {code} before it served; its log says why")
        try:
            return await _probe(stub)
        except grpc.aio.AioRpcError as error:
            if loop.time() > deadline_s:
                raise StartError(
                    f"a worker did not serve within {timeout_s:g} s: {error.code().name}"
                ) from error
        await asyncio.sleep(RETRY_S)
