"""One wrapper around every handler: errors become statuses, malformed bytes become an error.

Knows gRPC handlers and `service.errors`; knows no service.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc
from structlog.typing import FilteringBoundLogger

from service.errors import PagecastError, Reason, to_status

Context = grpc.aio.ServicerContext[Any, Any]
# Quoted: generic in the stubs of grpc only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request whose bytes are not a message of its type."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Translates what handlers raise, and what deserialisers raise.

    `PagecastError` becomes its status. Anything else is a bug: it is logged whole under an error
    id, and the caller gets INTERNAL with that id. A stream's generator is closed as soon as its
    call is over, so that its `finally` runs then and not when it is collected.
    """

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Wrap the handler that would serve the call; None where there is none."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return _rebuild(handler, self._guard(_behavior(handler), handler_call_details.method))

    def _guard(
        self, behavior: Callable[[Any, Context], Any], method: str
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                return await _run(behavior, request, context)
            except PagecastError as error:
                failure = error
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001  the place where bugs are told from refusals
                failure = self._bug(error, method)
            return await context.abort_with_status(to_status(failure))

        return guarded

    def _bug(self, error: Exception, method: str) -> PagecastError:
        error_id = secrets.token_hex(8)
        self._log.error("internal_error", error_id=error_id, method=method, exc_info=error)
        return PagecastError(
            Reason.INTERNAL, f"an internal error, logged as {error_id}", metadata={"error_id": error_id}
        )


async def _run(behavior: Callable[[Any, Context], Any], request: Any, context: Context) -> Any:
    """Run a handler of any arity; the responses of a generator are written one by one."""
    if isinstance(request, _Malformed):
        raise _malformed()
    if isinstance(request, AsyncIterable):
        request = _checked(request)
    result = behavior(request, context)
    if not isinstance(result, AsyncGenerator):
        return await result
    write = context.write
    async with aclosing(result):
        async for response in result:
            try:
                await write(response)
            except grpc.aio.BaseError as error:
                # The client left during a write that waited: the handler ends as by a cancel.
                raise asyncio.CancelledError from error
    return None


async def _checked(requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Malformed):
            raise _malformed()
        yield request


def _malformed() -> PagecastError:
    return PagecastError(Reason.MALFORMED_MESSAGE, "the request's bytes are not a message of its type")


def _behavior(handler: Handler) -> Callable[[Any, Context], Any]:
    behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    if behavior is None:
        raise TypeError("a method handler without a behavior")
    # The stubs of grpc type it for synchronous servers.
    return cast("Callable[[Any, Context], Any]", behavior)


def _rebuild(handler: Handler, behavior: Callable[[Any, Context], Awaitable[Any]]) -> Handler:
    """Make a handler of the same arity around `behavior`."""
    if handler.request_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
    else:
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
    return make(behavior, _lenient(handler.request_deserializer), handler.response_serializer)


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return `_Malformed` where `deserialize` raises: grpc.aio answers that with UNKNOWN and its text."""
    if deserialize is None:
        return None

    def lenient(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:  # noqa: BLE001  whatever a parser raises means the same
            return _Malformed()

    return lenient
