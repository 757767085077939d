"""One worker as the gateway sees it: calls, step reports, and whether it is still there.

Knows the worker protocol; does not know sessions, clients or how the worker was started.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc
from structlog.typing import FilteringBoundLogger

from pagecast.v1 import model_pb2
from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc
from service.errors import PagecastError, Reason, from_refusal
from service.pool.channel import (
    RETRY_S,
    TOKEN_KEY,
    ExitCode,
    Metadata,
    WrongVersion,
    open_channel,
    probe,
    wait_until_serving,
)
from service.pool.mailbox import Mailbox
from service.pool.prober import hang
from service.pool.steps import StepReader, worker_lost

CALL_TIMEOUT_S = 30.0
# How long a worker whose reports stopped may take to answer before it counts as lost.
RECONNECT_S = 3.0
# How long a call whose connection broke waits to know whether the worker is lost.
FATE_S = 1.0
CLOSE_TIMEOUT_S = 2.0
DEFAULT_WORKER_TIMEOUT_S = 10.0
DEFAULT_STEP_TIMEOUT_S = 300.0
_BROKEN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
# Nobody can tell whether such a call was carried out.
_UNSETTLED = frozenset({Reason.WORKER_LOST, Reason.NO_WORKER})

Request = TypeVar("Request")
Response = TypeVar(
    "Response",
    worker_pb2.OpenSessionResponse,
    worker_pb2.GetSessionResponse,
    worker_pb2.BatchGetSessionsResponse,
    worker_pb2.UpdateSessionResponse,
    worker_pb2.CloseSessionResponse,
    worker_pb2.SubmitResponse,
    worker_pb2.CancelResponse,
    worker_pb2.TokenizeResponse,
    worker_pb2.DetokenizeResponse,
)
Result = TypeVar("Result")


class WorkerLink:
    """A channel to one worker process, the task that reads its step reports, and one that probes it.

    Make one with `connect`. Losing the worker is final: every followed generation fails with
    WORKER_LOST, and so does every later call.

    Attributes:
        stub: For `call`.
        model: What the worker serves.
        instance_id: Of the worker's process.
        owner_id: Of the sessions opened over this link, which the worker closes when the link is gone.
        lost: Set once the worker is lost or the link is closed.
        is_hung: Whether it was lost because it answered no more; its process may still be there.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        info: worker_pb2.GetWorkerInfoResponse,
        exit_code: ExitCode,
        log: FilteringBoundLogger,
        *,
        metadata: Metadata,
        worker_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self.model: model_pb2.Model = info.model
        self.instance_id: str = info.instance_id
        self.owner_id = secrets.token_hex(8)
        self.lost = asyncio.Event()
        self.is_hung = False
        self._channel = channel
        self._metadata = metadata
        self._exit_code = exit_code
        self._worker_timeout_s = worker_timeout_s
        self._step_timeout_s = step_timeout_s
        self._log = log.bind(worker=info.instance_id)
        self._background: set[asyncio.Task[Any]] = set()
        self._steps = StepReader(self.stub, self.owner_id, metadata, self._log)
        self._reader = asyncio.create_task(self._read(), name="step-reader")
        self._prober = asyncio.create_task(self._probe_on(), name="worker-prober")

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        version: str,
        exit_code: ExitCode,
        timeout_s: float,
        log: FilteringBoundLogger,
        token: str = "",
        worker_timeout_s: float = DEFAULT_WORKER_TIMEOUT_S,
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    ) -> "WorkerLink":
        """Wait until the worker at `address` serves, and follow its step reports.

        Args:
            address: gRPC target.
            version: Of Pagecast, that the worker's has to equal.
            exit_code: Tells the exit code of its process; None while it runs or where nobody knows.
            timeout_s: How long it may take until it serves.
            log: Gets the link's events.
            token: What the worker asks of its callers; empty where it asks for nothing.
            worker_timeout_s: A worker that answers nothing for so long is lost.
            step_timeout_s: One whose step takes longer is lost too.

        Raises:
            StartError: Its process ended, `timeout_s` passed, or (WrongVersion) it is of another version.
        """
        channel = open_channel(address)
        metadata = ((TOKEN_KEY, token),) if token else ()
        try:
            info = await wait_until_serving(channel, exit_code, timeout_s, metadata)
            if info.version != version:
                raise WrongVersion(f"the worker is of version {info.version!r}, this gateway of {version!r}")
        except BaseException:
            await channel.close()
            raise
        return cls(
            channel,
            info,
            exit_code,
            log,
            metadata=metadata,
            worker_timeout_s=worker_timeout_s,
            step_timeout_s=step_timeout_s,
        )

    async def call(
        self, method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]", request: Request
    ) -> Response:
        """Call the worker.

        Raises:
            PagecastError: What the worker refused with; WORKER_LOST when it is lost, which a caller whose
                connection broke waits for up to `FATE_S` to know; NO_WORKER when it did not answer within
                `CALL_TIMEOUT_S`, and may live.
            grpc.aio.AioRpcError: A bug in the worker.
        """
        if self.lost.is_set():
            raise worker_lost()
        try:
            response = await method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise PagecastError(Reason.NO_WORKER, "the worker did not answer in time") from error
            if error.code() in _BROKEN:
                # Not wait_for: Python 3.11's forgets a cancellation that comes with what it waits for.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FATE_S):
                        await self.lost.wait()
                raise worker_lost() from error
            raise
        refusal = _refusal(response)
        if refusal is not None:
            raise from_refusal(refusal)
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

    async def attempt(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do `work` whose failure changes nothing for anybody: a refusal, or a worker that is lost.

        It is made here: a task that is cancelled before it ran leaves nothing behind that was never awaited.
        """
        try:
            await work()
        except PagecastError as error:
            self._log.debug("background_call_failed", reason=str(error.reason))
        except grpc.aio.AioRpcError as error:
            self._log.error("background_call_failed", exc_info=error)

    def follow(self, generation_id: str) -> contextlib.AbstractContextManager[Mailbox]:
        """Collect the generation's events; enter before it is submitted, they may come before the reply."""
        return self._steps.follow(generation_id)

    async def close(self) -> None:
        """Let background work end for at most `CLOSE_TIMEOUT_S`, then cut the channel."""
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_TIMEOUT_S)
        leftover = [self._reader, self._prober, *self._background]
        for task in leftover:
            task.cancel()
        await asyncio.gather(*leftover, return_exceptions=True)
        self._lose()  # a reader that is cancelled before it ran has not said so
        await self._channel.close()

    async def _undo(self, task: asyncio.Task[Any], undo: Callable[[], Awaitable[object]]) -> None:
        await asyncio.wait([task])
        error = None if task.cancelled() else task.exception()
        is_refused = isinstance(error, PagecastError) and error.reason not in _UNSETTLED
        if not is_refused:
            await self.attempt(undo)

    async def _read(self) -> None:
        """Read reports, coming back after the last one for as long as the worker is there."""
        try:
            while True:
                if not await self._steps.read() or not await self._is_there():
                    break
        except Exception as error:  # noqa: BLE001  streams must fail, not hang, whatever happens here
            self._log.error("step_reader_failed", exc_info=error)
        finally:
            self._lose()

    async def _is_there(self) -> bool:
        """Whether the same worker process answers within `RECONNECT_S`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + RECONNECT_S
        while loop.time() < deadline_s:
            await asyncio.sleep(RETRY_S)
            if self._exit_code() is not None:
                break
            try:
                info = await probe(self.stub, self._metadata)
            except grpc.aio.AioRpcError:
                continue
            return info.instance_id == self.instance_id
        return False

    async def _probe_on(self) -> None:
        self._hang(
            await hang(
                self.stub,
                self._metadata,
                worker_timeout_s=self._worker_timeout_s,
                step_timeout_s=self._step_timeout_s,
            )
        )

    def _hang(self, why: str) -> None:
        if not self.lost.is_set():
            self._log.error("worker_hangs", error=why)
            self.is_hung = True
            self._lose()

    def _lose(self) -> None:
        self.lost.set()
        self._steps.end()


def _refusal(response: Any) -> worker_pb2.Refusal | None:
    """Return the refusal that a response is; None where it is none, or its kind has none."""
    has_some = "refusal" in response.DESCRIPTOR.fields_by_name and response.HasField("refusal")
    refusal: worker_pb2.Refusal | None = response.refusal if has_some else None
    return refusal
