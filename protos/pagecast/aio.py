"""The asyncio client. Knows channels and calls; what goes in and comes out is `_requests` and `_turn`."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Self, TypeVar, Unpack

import grpc

from pagecast import _checks, _requests, errors
from pagecast._turn import Turn
from pagecast.options import GenerateOptions, SessionOptions
from pagecast.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from pagecast.values import Chunk, PagedDecodePlan, Result, TurnInput

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


class AsyncClient:
    """`pagecast.Client` for asyncio: one connection, made by the first call, of one event loop.

    Every failed call raises from the tree of `pagecast.errors`.

    Args:
        target: HOST:PORT, or any other gRPC target.
        timeout_s: Deadline of each call but `generate`, in seconds.
    """

    def __init__(self, target: str = "127.0.0.1:7070", *, timeout_s: float = 30.0) -> None:
        self._connection = _Connection(target, timeout_s)

    async def open_session(
        self, model: str, *, timeout_s: float | None = None, **options: Unpack[SessionOptions]
    ) -> "AsyncClientSession":
        """Open a session on a served model.

        Args:
            model: One of the names that `models` lists.
            timeout_s: Deadline of the call in seconds; None: the client's.
            **options: `pagecast.SessionOptions` says what else can be set.

        Raises:
            TypeError, ValueError: An option cannot be sent; nothing was.
        """
        request = _requests.open_session(model, **options)
        opened = await self._connection.call(self._connection.sessions.OpenSession, request, timeout_s)
        return self.session(opened.session.session_id)

    def session(self, session_id: str) -> "AsyncClientSession":
        """A handle on a session that is open already; asks the server nothing."""
        return AsyncClientSession(self._connection, session_id)

    async def models(self, *, timeout_s: float | None = None) -> Sequence[model_pb2.Model]:
        """The models that sessions can be opened on."""
        request = model_pb2.ListModelsRequest()
        return (await self._connection.call(self._connection.models.ListModels, request, timeout_s)).models

    async def close(self) -> None:
        """End the connection and the calls on it. Sessions stay open on the server."""
        await self._connection.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class AsyncClientSession:
    """A session on the server; as an async context manager it closes the session on exit."""

    def __init__(self, connection: "_Connection", session_id: str) -> None:
        self.session_id = session_id
        self._connection = connection

    def generate(
        self,
        content: TurnInput,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> "AsyncGeneration":
        """Send one turn; see `ClientSession.generate`. Needs a running event loop."""
        request = _requests.generate(self.session_id, content, **options)
        return AsyncGeneration(self._connection, request, timeout_s)

    async def cancel(self, generation_id: str, *, timeout_s: float | None = None) -> None:
        """End a running generation from outside: its stream ends with FinishReason.CANCELLED."""
        request = _requests.cancel_generation(self.session_id, generation_id)
        await self._connection.call(self._connection.generations.CancelGeneration, request, timeout_s)

    async def get(self, *, timeout_s: float | None = None) -> session_pb2.Session:
        """The session as the server sees it now."""
        request = _requests.get_session(self.session_id)
        return (await self._connection.call(self._connection.sessions.GetSession, request, timeout_s)).session

    async def update(
        self,
        *,
        plan: PagedDecodePlan | None = None,
        labels: Mapping[str, str] | None = None,
        expected_revision: int | None = None,
        timeout_s: float | None = None,
    ) -> session_pb2.Session:
        """Change what is given, from the session's next step on, also in the middle of a generation."""
        request = _requests.update_session(self.session_id, plan, labels, expected_revision)
        method = self._connection.sessions.UpdateSession
        return (await self._connection.call(method, request, timeout_s)).session

    async def close(self, *, timeout_s: float | None = None) -> session_pb2.Session:
        """End the session and what runs in it; closing twice is no error."""
        request = _requests.close_session(self.session_id)
        method = self._connection.sessions.CloseSession
        return (await self._connection.call(method, request, timeout_s)).session

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        # What went wrong inside matters more than that closing failed too.
        with contextlib.suppress(*([errors.PagecastError] if kind else [])):
            await self.close()


class AsyncGeneration(AsyncIterator[Chunk]):
    """One turn's tokens, as chunks in the order of arrival.

    Leaving it as a context manager cancels it, and so does dropping the last reference to it.
    """

    def __init__(
        self, connection: "_Connection", request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> None:
        self._turn = Turn()
        self._timeout_s = _checks.timeout_s(timeout_s)
        self._cancelled = False
        loop = asyncio.get_running_loop()
        self._call = connection.generations.Generate(request, timeout=self._timeout_s)
        # gRPC keeps a call until it has ended, so that nobody else would end one that is dropped.
        weakref.finalize(self, _cancel_dropped, loop, self._call).atexit = False

    @property
    def generation_id(self) -> str | None:
        """The id to cancel it by; None until the server has announced it."""
        return self._turn.generation_id

    @property
    def result(self) -> Result:
        """The finished turn. Raises RuntimeError before the iteration has ended."""
        return self._turn.require_result()

    async def __anext__(self) -> Chunk:
        try:
            while isinstance(response := await self._call.read(), generation_pb2.GenerateResponse):
                chunk = self._turn.fold(response)
                if chunk is not None:
                    return chunk
            self._turn.check_ended()
        except grpc.RpcError as error:
            raise errors.decode(error, self._timeout_s) from error
        except errors.BrokenStream:
            self.cancel()
            raise
        except asyncio.CancelledError:
            # gRPC raises it for the call's own cancel too; the task's must stay what it is.
            task = asyncio.current_task()
            if not self._cancelled or (task is not None and task.cancelling()):
                raise
            raise errors.cancelled() from None
        raise StopAsyncIteration

    async def wait(self) -> Result:
        """Read to the end."""
        async for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """End the call now; reading on raises `Cancelled`. Does nothing once it has ended."""
        self._cancelled = self._call.cancel() or self._cancelled

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()


def _cancel_dropped(loop: asyncio.AbstractEventLoop, call: grpc.aio.Call) -> None:
    """Cancel a call that nobody reads any more; any thread may be collecting garbage."""
    if not call.done():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the call ended with it
            loop.call_soon_threadsafe(call.cancel)


class _Connection:
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
            raise errors.decode(error, deadline_s) from error
