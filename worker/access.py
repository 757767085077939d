"""Who may call a worker: whoever has the token that its parent gave it. Knows metadata, and no call."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc

TOKEN_KEY = "pagecast-token"  # noqa: S105  a name, no secret
# Quoted: generic in the stubs of grpc only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to calls without the token.

    Args:
        token: ASCII text, not empty.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Return the handler that would serve the call, or one that refuses."""
        given = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY, "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        # In a time that does not depend on how much of it is right.
        if hmac.compare_digest(given_bytes, self._token):
            return await continuation(handler_call_details)
        # Of the simplest arity: a call that ends without a response looks the same in all of them.
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(_request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"calls carry {TOKEN_KEY}")
