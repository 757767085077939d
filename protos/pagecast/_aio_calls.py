"""The asyncio client's channel and streams. Knows no session; what comes in and out is `_turn`'s."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator
from typing import Self, TypeVar

import grpc

from pagecast import _checks, _failures, _requests, errors
from pagecast._turn import Turn
from pagecast.v1 import generation_pb2, generation_pb2_grpc, model_pb2_grpc, session_pb2_grpc
from pagecast.values import Chunk, Result

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


class Connection:
    """A channel and its stubs, shared by a client and its sessions."""

    def __init__(self, target: str, timeout_s: float) -> None:
        self.channel = grpc.aio.insecure_channel(
            _checks.text("target", target), options=_requests.CHANNEL_OPTIONS
        )
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self.generations = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        self._timeout_s = _checks.timeout_s(timeout_s)

    async def call(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer]",
        request: _Request,
        timeout_s: float | None,
    ) -> _Answer:
        """Make one call within `timeout_s`, or the client's own deadline."""
        deadline_s = self._timeout_s if timeout_s is None else _checks.timeout_s(timeout_s)
        try:
            return await method(request, timeout=deadline_s)
        except grpc.RpcError as error:
            raise _failures.decode(error, deadline_s) from error


class AsyncGeneration(AsyncIterator[Chunk]):
    """One turn's tokens, as chunks in the order of arrival.

    Leaving it as a context manager cancels it, and so does dropping the last reference to it.
    """

    def __init__(
        self, connection: Connection, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> None:
        self._turn = Turn()
        self._timeout_s = _checks.timeout_s(timeout_s)
        loop = asyncio.get_running_loop()
        self._call = connection.generations.Generate(request, timeout=self._timeout_s)
        # gRPC keeps a call until it has ended, so that nobody else would end one that is dropped.
        weakref.finalize(self, _cancel_dropped, loop, self._call).atexit = False

    @property
    def generation_id(self) -> str | None:
        """The id to cancel it by; None until the server has announced it."""
        return self._turn.generation_id

    @property
    def text(self) -> str:
        """The text so far; it stays there when reading on raises."""
        return self._turn.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids so far; they stay there when reading on raises."""
        return self._turn.token_ids

    @property
    def result(self) -> Result:
        """The finished turn. Raises RuntimeError, which says why, where there is none."""
        return self._turn.require_result()

    async def __anext__(self) -> Chunk:
        try:
            while isinstance(response := await self._call.read(), generation_pb2.GenerateResponse):
                chunk = self._turn.fold(response)
                if chunk is not None:
                    return chunk
            self._turn.check_ended()
        except grpc.RpcError as error:
            raise self._failed(_failures.decode(error, self._timeout_s)) from error
        except errors.BrokenStream as error:
            self.cancel()
            raise self._failed(error) from None
        except asyncio.CancelledError:
            # gRPC raises it for the call's own cancel too; the task's must stay what it is.
            task = asyncio.current_task()
            if not self._turn.is_cancelled or (task is not None and task.cancelling()):
                self._turn.is_cancelled = True  # gRPC cancels the call of a reader that is cancelled
                raise
            raise self._failed(_failures.cancelled()) from None
        raise StopAsyncIteration

    async def wait(self) -> Result:
        """Read to the end."""
        async for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """End the call now; reading on raises `Cancelled`. Does nothing once it has ended."""
        self._turn.is_cancelled = self._call.cancel() or self._turn.is_cancelled

    def _failed(self, error: errors.PagecastError) -> errors.PagecastError:
        self._turn.failure = str(error)
        return error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()


def _cancel_dropped(loop: asyncio.AbstractEventLoop, call: grpc.aio.Call) -> None:
    """Cancel a call that nobody reads any more; any thread may be collecting garbage."""
    if not call.done():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the call ended with it
            loop.call_soon_threadsafe(call.cancel)
